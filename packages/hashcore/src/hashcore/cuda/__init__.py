"""CUDA through NVRTC and the driver: sources, cubins and launches. Other packages can use it for their own kernels.

Importing this needs neither CUDA nor torch; compiling needs cuda-core, launching needs torch and a device.
"""
