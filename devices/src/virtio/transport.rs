//! Virtio over MMIO, version 2 (virtio 1.2, section 4.2).
//!
//! ```text
//!  status   0 -> ACKNOWLEDGE -> DRIVER ------> FEATURES_OK -----------> DRIVER_OK ---> (device runs)
//!                                 |                |                        |
//!  driver may write          features        queue size, rings,       notify, ack
//!                                            ready (until ready)
//!
//!  any state -- write 0 --> reset          any state -- fatal error --> NEEDS_RESET (only reset leaves it)
//! ```
//!
//! A write that the state does not allow is ignored and counted: a guest that breaks the order gets
//! a device that does not work, not a monitor that fails. virtio-queue's setters check nothing, so
//! the set-up is held here as plain numbers and becomes a [`Queue`] only at activation.

use virtio_queue::{Queue, QueueState, QueueT};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

use super::registers as reg;
use super::{ActivateError, Activation, Interrupt, VirtioDevice};
use crate::sparse::Sparse;

/// Size of a device's window in guest physical address space, in bytes.
pub const MMIO_WINDOW: u64 = 0x1000;

/// Where in the window `QueueNotify` lies: the address for ioeventfds is base + this.
pub const NOTIFY_OFFSET: u64 = reg::QUEUE_NOTIFY;

/// What a bus needs of a device: reads and writes at an offset in its window. Never blocks for
/// long.
pub trait MmioDevice {
    /// Fills `data` with what the guest reads at `offset`; all-ones where nothing is.
    fn read(&mut self, offset: u64, data: &mut [u8]);

    /// Takes what the guest writes at `offset`; ignored where nothing is.
    fn write(&mut self, offset: u64, data: &[u8]);
}

/// The registers of one virtio device.
#[derive(Debug)]
pub struct VirtioMmio<D> {
    device: D,
    memory: GuestMemoryMmap,
    interrupt: Interrupt,
    status: u32,
    device_features_sel: u32,
    driver_features_sel: u32,
    driver_features: u64,
    queue_sel: u32,
    queues: Vec<QueueSetup>,
    refused_writes: Sparse,
    failed_activations: Sparse,
}

/// What the driver has written about one queue: untrusted until [`QueueSetup::queue`].
#[derive(Clone, Copy, Debug)]
struct QueueSetup {
    max_size: u16,
    size: u32,
    ready: bool,
    desc_table: u64,
    avail_ring: u64,
    used_ring: u64,
}

impl<D: VirtioDevice> VirtioMmio<D> {
    /// A device in its reset state. `line` is the eventfd that the monitor has registered as its
    /// irqfd.
    pub fn new(device: D, memory: GuestMemoryMmap, line: EventFd) -> Self {
        let queues = device
            .queue_sizes()
            .iter()
            .map(|&size| QueueSetup::new(size))
            .collect();
        Self {
            device,
            memory,
            interrupt: Interrupt::new(line),
            status: 0,
            device_features_sel: 0,
            driver_features_sel: 0,
            driver_features: 0,
            queue_sel: 0,
            queues,
            refused_writes: Sparse::default(),
            failed_activations: Sparse::default(),
        }
    }

    /// The device behind the registers.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The device's interrupt.
    pub fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// How many writes the state machine has refused.
    pub fn refused_writes(&self) -> u64 {
        self.refused_writes.count()
    }

    /// True between `DRIVER_OK` and reset or failure.
    pub fn is_running(&self) -> bool {
        self.status & reg::DRIVER_OK != 0 && !self.interrupt.needs_reset()
    }

    fn offered(&self) -> u64 {
        self.device.features() | reg::FEATURE_VERSION_1
    }

    fn status(&self) -> u32 {
        if self.interrupt.needs_reset() {
            self.status | reg::NEEDS_RESET
        } else {
            self.status
        }
    }

    fn read_register(&self, offset: u64) -> Option<u32> {
        let queue = self.queues.get(self.queue_sel as usize);
        Some(match offset {
            reg::MAGIC_VALUE => reg::MAGIC,
            reg::VERSION => reg::VERSION_2,
            reg::DEVICE_ID => self.device.device_id(),
            reg::VENDOR_ID => reg::VENDOR,
            reg::DEVICE_FEATURES => half(self.offered(), self.device_features_sel),
            // Zero tells the driver that there is no such queue.
            reg::QUEUE_NUM_MAX => queue.map_or(0, |queue| u32::from(queue.max_size)),
            reg::QUEUE_READY => queue.map_or(0, |queue| u32::from(queue.ready)),
            reg::INTERRUPT_STATUS => self.interrupt.status(),
            reg::STATUS => self.status(),
            // VIRTIO_F_RING_RESET is not offered: no queue is ever being reset.
            reg::QUEUE_RESET => 0,
            reg::CONFIG_GENERATION => self.interrupt.generation(),
            _ => return None,
        })
    }

    /// False if the state or the offset does not allow it.
    fn write_register(&mut self, offset: u64, value: u32) -> bool {
        match offset {
            reg::DEVICE_FEATURES_SEL => self.device_features_sel = value,
            reg::DRIVER_FEATURES_SEL => self.driver_features_sel = value,
            reg::DRIVER_FEATURES => return self.write_driver_features(value),
            reg::QUEUE_SEL => self.queue_sel = value,
            reg::QUEUE_NUM => return self.set_up_queue(|queue| queue.size = value),
            reg::QUEUE_READY => return self.write_queue_ready(value),
            reg::QUEUE_NOTIFY => return self.notify(value),
            reg::INTERRUPT_ACK => self.interrupt.acknowledge(value),
            reg::STATUS => return self.write_status(value),
            reg::QUEUE_DESC_LOW => {
                return self.set_up_queue(|queue| set_low(&mut queue.desc_table, value));
            }
            reg::QUEUE_DESC_HIGH => {
                return self.set_up_queue(|queue| set_high(&mut queue.desc_table, value));
            }
            reg::QUEUE_DRIVER_LOW => {
                return self.set_up_queue(|queue| set_low(&mut queue.avail_ring, value));
            }
            reg::QUEUE_DRIVER_HIGH => {
                return self.set_up_queue(|queue| set_high(&mut queue.avail_ring, value));
            }
            reg::QUEUE_DEVICE_LOW => {
                return self.set_up_queue(|queue| set_low(&mut queue.used_ring, value));
            }
            reg::QUEUE_DEVICE_HIGH => {
                return self.set_up_queue(|queue| set_high(&mut queue.used_ring, value));
            }
            _ => return false,
        }
        true
    }

    /// Features may be chosen after DRIVER and are frozen by FEATURES_OK.
    fn write_driver_features(&mut self, value: u32) -> bool {
        if self.status() != reg::ACKNOWLEDGE | reg::DRIVER {
            return false;
        }
        match self.driver_features_sel {
            0 => set_low(&mut self.driver_features, value),
            1 => set_high(&mut self.driver_features, value),
            // There are no feature bits above 63; choosing none of them is fine.
            _ => return value == 0,
        }
        true
    }

    fn may_set_up_queues(&self) -> bool {
        self.status() == reg::ACKNOWLEDGE | reg::DRIVER | reg::FEATURES_OK
    }

    /// Changes the selected queue, unless it is live or features are not agreed yet.
    fn set_up_queue(&mut self, change: impl FnOnce(&mut QueueSetup)) -> bool {
        if !self.may_set_up_queues() {
            return false;
        }
        match self.queues.get_mut(self.queue_sel as usize) {
            Some(queue) if !queue.ready => {
                change(queue);
                true
            }
            _ => false,
        }
    }

    fn write_queue_ready(&mut self, value: u32) -> bool {
        if value > 1 || !self.may_set_up_queues() {
            return false;
        }
        let Some(queue) = self.queues.get_mut(self.queue_sel as usize) else {
            return false;
        };
        queue.ready = value == 1;
        true
    }

    fn notify(&mut self, value: u32) -> bool {
        // Rung even while the device is inactive: its loop drains the bell and finds nothing to do
        // (VS03).
        match self.device.kicks().get(value as usize) {
            Some(kick) => kick.ring(),
            None => return false,
        }
        true
    }

    fn write_status(&mut self, value: u32) -> bool {
        if value == 0 {
            self.reset();
            return true;
        }
        // NEEDS_RESET is the device's: drivers write back what they have read.
        let value = value & !reg::NEEDS_RESET;
        // A driver never clears a bit other than by reset.
        if self.status & !value != 0 {
            return false;
        }
        if value & reg::FAILED != 0 {
            self.status |= reg::FAILED;
        }
        // Given up or broken: only a reset leads on.
        if self.status & reg::FAILED != 0 || self.interrupt.needs_reset() {
            return value & !self.status == 0;
        }
        let known = STATUS_BITS & value;
        let mut accepted = known == value;
        for bit in reg::STATUS_ORDER {
            if self.status & bit != 0 {
                continue;
            }
            if known & bit == 0 {
                // Bits beyond the first gap would be out of order.
                accepted &= known & !self.status == 0;
                break;
            }
            if bit == reg::FEATURES_OK && !self.features_acceptable() {
                // The driver reads the register again and finds the bit missing (section 3.1.1,
                // step 6).
                return false;
            }
            self.status |= bit;
            if bit == reg::DRIVER_OK {
                self.activate();
            }
        }
        accepted
    }

    fn features_acceptable(&self) -> bool {
        self.driver_features & !self.offered() == 0
            && self.driver_features & reg::FEATURE_VERSION_1 != 0
    }

    fn activate(&mut self) {
        if let Err(error) = self.try_activate() {
            if let Some(count) = self.failed_activations.tell() {
                let device = self.device.device_id();
                tracing::warn!(%error, device, count, "device not activated");
            }
            self.interrupt.signal_needs_reset();
        }
    }

    fn try_activate(&mut self) -> Result<(), ActivateError> {
        let event_idx = self.driver_features & reg::FEATURE_EVENT_IDX != 0;
        let queues = self
            .queues
            .iter()
            .enumerate()
            .map(|(index, setup)| match setup.ready {
                false => Ok(None),
                true => setup
                    .queue(event_idx, &self.memory)
                    .map(Some)
                    .ok_or(ActivateError::QueueNotValid { index }),
            })
            .collect::<Result<_, _>>()?;
        self.device.activate(Activation {
            memory: self.memory.clone(),
            queues,
            features: self.driver_features,
            interrupt: self.interrupt.clone(),
        })
    }

    fn reset(&mut self) {
        // The device first: once it has stopped, nothing can raise the line that is cleared next.
        self.device.reset();
        self.interrupt.reset();
        self.status = 0;
        self.device_features_sel = 0;
        self.driver_features_sel = 0;
        self.driver_features = 0;
        self.queue_sel = 0;
        for queue in &mut self.queues {
            *queue = QueueSetup::new(queue.max_size);
        }
    }

    fn refuse(&mut self, offset: u64, width: usize) {
        if let Some(count) = self.refused_writes.tell() {
            tracing::debug!(offset, width, count, "register write refused");
        }
    }
}

/// All the bits that a driver sets.
const STATUS_BITS: u32 =
    reg::ACKNOWLEDGE | reg::DRIVER | reg::FEATURES_OK | reg::DRIVER_OK | reg::FAILED;

impl<D: VirtioDevice> MmioDevice for VirtioMmio<D> {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if offset >= reg::CONFIG {
            if offset < MMIO_WINDOW {
                self.device.read_config(offset - reg::CONFIG, data);
            }
            return;
        }
        // Registers are 32 bits wide and aligned (section 4.2.2.2).
        if let ([_, _, _, _], Some(value)) = (&*data, self.read_register(offset)) {
            data.copy_from_slice(&value.to_le_bytes());
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let accepted = if offset >= reg::CONFIG {
            let running = self.status & reg::DRIVER != 0 && offset < MMIO_WINDOW;
            if running {
                self.device.write_config(offset - reg::CONFIG, data);
            }
            running
        } else if let Ok(value) = data.try_into() {
            self.write_register(offset, u32::from_le_bytes(value))
        } else {
            false
        };
        if !accepted {
            self.refuse(offset, data.len());
        }
    }
}

impl QueueSetup {
    fn new(max_size: u16) -> Self {
        Self {
            max_size,
            size: u32::from(max_size),
            ready: false,
            desc_table: 0,
            avail_ring: 0,
            used_ring: 0,
        }
    }

    /// The queue, if the set-up is sound: sizes and alignment by `try_from`, the rings' place by
    /// `is_valid`.
    fn queue(&self, event_idx_enabled: bool, memory: &GuestMemoryMmap) -> Option<Queue> {
        let state = QueueState {
            max_size: self.max_size,
            next_avail: 0,
            next_used: 0,
            event_idx_enabled,
            size: u16::try_from(self.size).ok()?,
            ready: self.ready,
            desc_table: self.desc_table,
            avail_ring: self.avail_ring,
            used_ring: self.used_ring,
        };
        Queue::try_from(state)
            .ok()
            .filter(|queue| queue.is_valid(memory))
    }
}

fn half(value: u64, selector: u32) -> u32 {
    match selector {
        0 => value as u32,
        1 => (value >> 32) as u32,
        _ => 0,
    }
}

fn set_low(target: &mut u64, value: u32) {
    *target = *target & !0xffff_ffff | u64::from(value);
}

fn set_high(target: &mut u64, value: u32) {
    *target = *target & 0xffff_ffff | u64::from(value) << 32;
}
