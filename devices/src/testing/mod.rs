//! The driver's side of virtio devices, for tests.
