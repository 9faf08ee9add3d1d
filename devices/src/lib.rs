//! Virtio-mmio transport, vsock, serial console: no KVM types.
