use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use virtio_queue::QueueT;
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::*;
use crate::testing::{Driver, DriverQueue};

const OFFERED: u64 = 1 << 29 | 1 << 5;
const VERSION_1: u64 = 1 << 32;

/// A device that records what the transport tells it.
struct Recorder {
    kicks: Vec<Kick>,
    log: Arc<Mutex<Log>>,
}

#[derive(Debug, Default)]
struct Log {
    activated: Vec<(u64, Vec<Option<u16>>, bool)>,
    interrupt: Option<Interrupt>,
    resets: usize,
    config_writes: usize,
}

impl VirtioDevice for Recorder {
    fn device_id(&self) -> u32 {
        19
    }

    fn queue_sizes(&self) -> &[u16] {
        &[16, 8]
    }

    fn features(&self) -> u64 {
        OFFERED
    }

    fn kicks(&self) -> &[Kick] {
        &self.kicks
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        if let (0, Some(first)) = (offset, data.first_mut()) {
            *first = 0x42;
        }
    }

    fn write_config(&mut self, _: u64, _: &[u8]) {
        self.log.lock().unwrap().config_writes += 1;
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let queues = activation.queues.iter();
        let sizes = queues
            .map(|queue| queue.as_ref().map(QueueT::size))
            .collect();
        let first = activation.queues[0].as_ref();
        let first = first.ok_or(ActivateError::QueueNotReady { index: 0 })?;
        let mut log = self.log.lock().unwrap();
        log.activated
            .push((activation.features, sizes, first.event_idx_enabled()));
        log.interrupt = Some(activation.interrupt);
        Ok(())
    }

    fn reset(&mut self) {
        self.log.lock().unwrap().resets += 1;
    }
}

struct Bench {
    driver: Driver<VirtioMmio<Recorder>>,
    log: Arc<Mutex<Log>>,
    memory: GuestMemoryMmap,
    line: EventFd,
}

impl Bench {
    fn new() -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let log = Arc::<Mutex<Log>>::default();
        let device = Recorder {
            kicks: vec![Kick::new().unwrap(), Kick::new().unwrap()],
            log: Arc::clone(&log),
        };
        let line = EventFd::new(EFD_NONBLOCK).unwrap();
        let registers = VirtioMmio::new(device, memory.clone(), line.try_clone().unwrap());
        Self {
            driver: Driver(registers),
            log,
            memory,
            line,
        }
    }

    fn queue(&self, base: u64, size: u16) -> DriverQueue {
        DriverQueue::new(&self.memory, base, size, true)
    }

    fn log(&self) -> std::sync::MutexGuard<'_, Log> {
        self.log.lock().unwrap()
    }

    /// Up and running with both queues.
    fn running() -> Self {
        let mut bench = Self::new();
        assert_eq!(bench.driver.negotiate(OFFERED | VERSION_1), 11);
        let (first, second) = (bench.queue(0x1_0000, 16), bench.queue(0x2_0000, 8));
        bench.driver.set_up(0, &first);
        bench.driver.set_up(1, &second);
        assert_eq!(bench.driver.add_status(4), 15);
        bench
    }
}

#[test]
fn driver_comes_up_in_the_order_of_the_specification() {
    let mut bench = Bench::new();
    let driver = &mut bench.driver;
    assert_eq!(driver.read(0x00), 0x7472_6976);
    assert_eq!(driver.read(0x04), 2);
    assert_eq!(driver.read(0x08), 19);
    assert_eq!(driver.offered(), OFFERED | VERSION_1);
    assert_eq!(driver.negotiate(1 << 29 | VERSION_1), 11);
    driver.write(0x30, 0);
    assert_eq!(driver.read(0x34), 16);
    driver.write(0x30, 2);
    assert_eq!(driver.read(0x34), 0, "no third queue");
    let queue = bench.queue(0x1_0000, 4);
    bench.driver.set_up(0, &queue);
    assert_eq!(bench.driver.read(0x44), 1);
    assert_eq!(bench.driver.add_status(4), 15);
    assert!(bench.driver.0.is_running());
    let expected = (1 << 29 | VERSION_1, vec![Some(4), None], true);
    assert_eq!(bench.log().activated, [expected]);
}

#[test]
fn status_bits_out_of_order_are_not_taken() {
    let mut bench = Bench::new();
    for (written, taken) in [
        (2, 0),
        (4, 0),
        (8, 0),
        (1 | 4, 1),
        (1 | 8, 1),
        (1 | 2 | 4, 3),
    ] {
        bench.driver.reset();
        bench.driver.write(0x70, written);
        assert_eq!(bench.driver.status(), taken, "{written}");
    }
    // A bit is never cleared, and unknown ones are not kept.
    bench.driver.reset();
    bench.driver.write(0x70, 3);
    bench.driver.write(0x70, 1);
    assert_eq!(bench.driver.status(), 3);
    bench.driver.write(0x70, 3 | 16);
    assert_eq!(bench.driver.status(), 3);
    assert!(bench.log().activated.is_empty());
}

#[test]
fn features_without_version_1_or_not_offered_are_not_ok() {
    for features in [0, OFFERED, VERSION_1 | 1, VERSION_1 | 1 << 40] {
        let mut bench = Bench::new();
        assert_eq!(bench.driver.negotiate(features), 3, "{features:#x}");
        // The driver may choose again.
        bench.driver.choose(VERSION_1);
        assert_eq!(bench.driver.add_status(8), 11);
    }
}

#[test]
fn features_are_frozen_by_features_ok() {
    let mut bench = Bench::new();
    assert_eq!(bench.driver.negotiate(VERSION_1), 11);
    bench.driver.choose(VERSION_1 | OFFERED);
    let queue = bench.queue(0x1_0000, 16);
    bench.driver.set_up(0, &queue);
    bench.driver.add_status(4);
    assert_eq!(bench.log().activated[0].0, VERSION_1);
    assert_eq!(bench.driver.0.refused_writes(), 2);
    // And not open before DRIVER either.
    bench.driver.reset();
    bench.driver.add_status(1);
    bench.driver.choose(VERSION_1);
    bench.driver.add_status(2);
    assert_eq!(bench.driver.add_status(8), 3);
}

#[test]
fn queues_change_only_between_features_ok_and_driver_ok_and_not_once_ready() {
    let mut bench = Bench::new();
    let queue = bench.queue(0x1_0000, 16);
    // Too early.
    bench.driver.reset();
    bench.driver.add_status(1);
    bench.driver.add_status(2);
    bench.driver.set_up(0, &queue);
    assert_eq!(bench.driver.read(0x44), 0);
    // In time; once ready, its numbers stand.
    bench.driver.choose(VERSION_1);
    bench.driver.add_status(8);
    bench.driver.set_up(0, &queue);
    bench.driver.write(0x38, 2);
    bench.driver.write(0x80, 0xdead_0000);
    // A driver may take one back before DRIVER_OK.
    bench.driver.write(0x30, 1);
    bench.driver.write(0x44, 1);
    bench.driver.write(0x44, 0);
    assert_eq!(bench.driver.add_status(4), 15);
    assert_eq!(bench.log().activated[0].1, [Some(16), None]);
    // Too late.
    let refused = bench.driver.0.refused_writes();
    bench.driver.write(0x30, 0);
    bench.driver.write(0x44, 0);
    bench.driver.write(0x90, 0);
    assert_eq!(bench.driver.read(0x44), 1);
    assert_eq!(bench.driver.0.refused_writes(), refused + 2);
}

#[test]
fn ho03_queue_that_is_not_valid_ends_in_needs_reset() {
    let set_ups: [(u32, u64); 8] = [
        (0x38, 0),
        (0x38, 3),
        (0x38, 32),
        (0x38, u64::from(u32::MAX)),
        (0x80, 0x1_0008),
        (0x90, 0x1_0001),
        (0xa0, 0x1_0002),
        (0xa0, (1 << 20) - 8),
    ];
    for (register, value) in set_ups {
        let mut bench = Bench::new();
        bench.driver.negotiate(VERSION_1);
        let queue = bench.queue(0x1_0000, 16);
        bench.driver.set_up(0, &queue);
        bench.driver.write(0x44, 0);
        bench.driver.write(u64::from(register), value as u32);
        bench.driver.write(0x44, 1);
        assert_eq!(
            bench.driver.add_status(4),
            15 | 64,
            "{register:#x} {value:#x}"
        );
        assert!(!bench.driver.0.is_running());
        // The driver is told by a configuration interrupt.
        assert!(bench.line.read().is_ok());
        assert_eq!(bench.driver.take_interrupt(), 2);
        assert!(bench.log().activated.is_empty());
        // Only a reset leads out of it.
        assert_eq!(bench.driver.add_status(4), 15 | 64);
        bench.driver.reset();
        assert_eq!(bench.driver.status(), 0);
    }
}

#[test]
fn queue_the_device_needs_but_the_driver_left_out_ends_in_needs_reset() {
    let mut bench = Bench::new();
    bench.driver.negotiate(VERSION_1);
    assert_eq!(bench.driver.add_status(4), 15 | 64);
}

#[test]
fn reset_brings_everything_back() {
    let mut bench = Bench::running();
    let interrupt = bench.log().interrupt.clone().unwrap();
    interrupt.signal_used();
    bench.driver.reset();
    assert_eq!(bench.driver.status(), 0);
    assert_eq!(bench.driver.read(0x60), 0);
    bench.driver.write(0x30, 0);
    assert_eq!(bench.driver.read(0x44), 0);
    assert_eq!(bench.log().resets, 1 + 1, "negotiate resets first");
    // And up again.
    bench.driver.negotiate(VERSION_1);
    let queue = bench.queue(0x3_0000, 16);
    bench.driver.set_up(0, &queue);
    assert_eq!(bench.driver.add_status(4), 15);
}

#[test]
fn failed_driver_stays_failed_until_reset() {
    let mut bench = Bench::running();
    assert_eq!(bench.driver.add_status(128), 15 | 128);
    bench.driver.reset();
    bench.driver.write(0x70, 1 | 128);
    bench.driver.write(0x70, 1 | 2 | 128);
    assert_eq!(bench.driver.status(), 128);
}

#[test]
fn interrupt_bits_are_set_acknowledged_one_by_one_and_raise_the_line() {
    let mut bench = Bench::running();
    let interrupt = bench.log().interrupt.clone().unwrap();
    let generation = bench.driver.read(0xfc);
    interrupt.signal_used();
    interrupt.signal_configuration();
    assert_eq!(bench.line.read().unwrap(), 2);
    assert_eq!(bench.driver.read(0x60), 3);
    bench.driver.write(0x64, 1);
    assert_eq!(bench.driver.read(0x60), 2);
    assert_eq!(bench.driver.read(0xfc), generation + 1);
    interrupt.signal_needs_reset();
    interrupt.signal_needs_reset();
    assert_eq!(bench.line.read().unwrap(), 1, "said once");
    assert_eq!(bench.driver.status(), 15 | 64);
    assert!(!bench.driver.0.is_running());
}

#[test]
fn notify_rings_the_bell_of_that_queue_only() {
    let mut bench = Bench::running();
    bench.driver.write(0x50, 1);
    bench.driver.write(0x50, 2);
    bench.driver.write(0x50, u32::MAX);
    let kicks = bench.driver.0.device().kicks();
    assert!(!kicks[0].take());
    assert!(kicks[1].take());
    assert!(!kicks[1].take());
}

#[test]
fn config_space_takes_any_width_and_reads_ones_where_nothing_is() {
    let mut bench = Bench::running();
    for width in [1, 2, 4, 8] {
        let mut data = vec![0; width];
        bench.driver.0.read(0x100, &mut data);
        assert_eq!(data[0], 0x42);
        assert!(data[1..].iter().all(|byte| *byte == 0xff));
        bench.driver.0.read(0x108, &mut data);
        assert!(data.iter().all(|byte| *byte == 0xff));
        bench.driver.0.write(0x100, &data);
    }
    assert_eq!(bench.log().config_writes, 4);
    // Not before there is a driver, nor beyond the window.
    bench.driver.0.write(0x1000, &[0]);
    bench.driver.reset();
    bench.driver.0.write(0x100, &[0]);
    assert_eq!(bench.log().config_writes, 4);
}

#[test]
fn ho07_every_offset_and_width_is_survived() {
    let mut bench = Bench::running();
    for offset in 0..0x1100 {
        for width in 0..=16 {
            let mut data = vec![0; width];
            bench.driver.0.read(offset, &mut data);
            let register = width == 4 && offset % 4 == 0 && offset < 0x100;
            let config = (0x100..0x1000).contains(&offset);
            if !register && !config {
                assert!(data.iter().all(|byte| *byte == 0xff), "{offset:#x} {width}");
            }
            // Wrong widths change nothing.
            if width != 4 {
                bench.driver.0.write(offset, &vec![0; width]);
            }
        }
    }
    assert!(bench.driver.0.is_running());
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, u32),
    Raw(u64, Vec<u8>),
    Up,
    NeedsReset,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let offset = prop_oneof![
        (0..64u64).prop_map(|register| register * 4),
        Just(0x70),
        Just(0x20),
        Just(0x44),
        any::<u64>(),
    ];
    let value = prop_oneof![0..=15u32, Just(64), Just(128), any::<u32>()];
    let raw = prop::collection::vec(any::<u8>(), 0..10);
    prop::collection::vec(
        prop_oneof![
            8 => (offset.clone(), value).prop_map(|(offset, value)| Step::Write(offset, value)),
            2 => (offset, raw).prop_map(|(offset, data)| Step::Raw(offset, data)),
            1 => Just(Step::Up),
            1 => Just(Step::NeedsReset),
        ],
        0..60,
    )
}

proptest! {
    /// Whatever is written: bits in order, a running device has agreed features and was activated
    /// since the last reset, and never twice.
    #[test]
    fn no_sequence_of_writes_breaks_the_state_machine(steps in steps()) {
        let mut bench = Bench::new();
        for step in steps {
            match step {
                Step::Write(offset, value) => bench.driver.write(offset, value),
                Step::Raw(offset, data) => bench.driver.0.write(offset, &data),
                Step::Up => {
                    bench.driver.negotiate(VERSION_1);
                    let queue = bench.queue(0x1_0000, 16);
                    bench.driver.set_up(0, &queue);
                    bench.driver.add_status(4);
                }
                Step::NeedsReset => {
                    let interrupt = bench.log().interrupt.clone();
                    if let Some(interrupt) = interrupt {
                        interrupt.signal_needs_reset();
                    }
                }
            }
            let status = bench.driver.status() & 15;
            prop_assert!([0, 1, 3, 11, 15].contains(&status), "{status}");
            let log = bench.log();
            prop_assert!(log.activated.len() <= log.resets + 1);
            if bench.driver.0.is_running() {
                let features = log.activated.last().unwrap().0;
                prop_assert_eq!(features & VERSION_1, VERSION_1);
                prop_assert_eq!(features & !(OFFERED | VERSION_1), 0);
            }
        }
    }
}
