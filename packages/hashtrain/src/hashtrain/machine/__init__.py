"""The machine: worker processes, torchrun's ranks, copies to and from the device, the C allocator."""
