//! Register offsets and status bits of virtio-mmio version 2 (virtio 1.2, section 4.2.2).

pub(super) const MAGIC_VALUE: u64 = 0x000;
pub(super) const VERSION: u64 = 0x004;
pub(super) const DEVICE_ID: u64 = 0x008;
pub(super) const VENDOR_ID: u64 = 0x00c;
pub(super) const DEVICE_FEATURES: u64 = 0x010;
pub(super) const DEVICE_FEATURES_SEL: u64 = 0x014;
pub(super) const DRIVER_FEATURES: u64 = 0x020;
pub(super) const DRIVER_FEATURES_SEL: u64 = 0x024;
pub(super) const QUEUE_SEL: u64 = 0x030;
pub(super) const QUEUE_NUM_MAX: u64 = 0x034;
pub(super) const QUEUE_NUM: u64 = 0x038;
pub(super) const QUEUE_READY: u64 = 0x044;
pub(super) const QUEUE_NOTIFY: u64 = 0x050;
pub(super) const INTERRUPT_STATUS: u64 = 0x060;
pub(super) const INTERRUPT_ACK: u64 = 0x064;
pub(super) const STATUS: u64 = 0x070;
pub(super) const QUEUE_DESC_LOW: u64 = 0x080;
pub(super) const QUEUE_DESC_HIGH: u64 = 0x084;
pub(super) const QUEUE_DRIVER_LOW: u64 = 0x090;
pub(super) const QUEUE_DRIVER_HIGH: u64 = 0x094;
pub(super) const QUEUE_DEVICE_LOW: u64 = 0x0a0;
pub(super) const QUEUE_DEVICE_HIGH: u64 = 0x0a4;
pub(super) const QUEUE_RESET: u64 = 0x0c0;
pub(super) const CONFIG_GENERATION: u64 = 0x0fc;
pub(super) const CONFIG: u64 = 0x100;

/// "virt", little endian.
pub(super) const MAGIC: u32 = 0x7472_6976;
/// Version 2: the register layout without the legacy interface.
pub(super) const VERSION_2: u32 = 2;
/// Vendor id: "vmm", little endian; drivers do not act on it.
pub(super) const VENDOR: u32 = 0x006d_6d76;

/// The guest has noticed the device.
pub(super) const ACKNOWLEDGE: u32 = 1;
/// The guest has a driver for it.
pub(super) const DRIVER: u32 = 2;
/// The driver is ready: the device runs.
pub(super) const DRIVER_OK: u32 = 4;
/// Features are agreed and frozen.
pub(super) const FEATURES_OK: u32 = 8;
/// The device has met an error that it cannot recover from; owned by the device.
pub(super) const NEEDS_RESET: u32 = 64;
/// The driver has given up on the device.
pub(super) const FAILED: u32 = 128;

/// The order in which a driver sets its bits (virtio 1.2, section 3.1.1).
pub(super) const STATUS_ORDER: [u32; 4] = [ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK];

/// Feature bit 29, `VIRTIO_F_EVENT_IDX`.
pub(super) const FEATURE_EVENT_IDX: u64 = 1 << 29;
/// Feature bit 32, `VIRTIO_F_VERSION_1`.
pub(super) const FEATURE_VERSION_1: u64 = 1 << 32;
