"""CUDA through NVRTC and the driver: sources, cubins and launches. For packages that bring kernels of their own.

Importing this needs neither CUDA nor torch; compiling needs cuda-core, launching needs torch and a device.
"""
