//! How a machine ends, told apart, and the one place where the first reason is kept.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vmm_events::Waker;

/// Why a machine stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExitReason {
    /// The guest powered off (sleep control register).
    Shutdown,
    /// The guest asked for a reset (reset register or keyboard controller).
    Reset,
    /// The guest faulted while handling a double fault: it has no working exception handlers.
    TripleFault,
    /// The guest's kernel panicked; with its message where the console has one.
    Panic(Option<String>),
    /// We stopped it.
    Stopped,
    /// KVM cannot go on; says where the guest was.
    Failed(String),
}

impl fmt::Display for ExitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shutdown => f.write_str("the guest powered off"),
            Self::Reset => f.write_str("the guest asked for a reset"),
            Self::TripleFault => f.write_str("the guest's CPU shut down after a triple fault"),
            Self::Panic(None) => f.write_str("the guest's kernel panicked"),
            Self::Panic(Some(message)) => write!(f, "the guest's kernel panicked: {message}"),
            Self::Stopped => f.write_str("the machine was stopped"),
            Self::Failed(report) => write!(f, "the machine failed: {report}"),
        }
    }
}

/// What the device loop and the vCPUs have done so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Metrics {
    /// Of its event loop.
    pub events: vmm_events::Counters,
    /// Of the vsock device.
    pub vsock: vmm_devices::vsock::Counters,
    /// Connections through it, those that only flush their last bytes included.
    pub connections: usize,
    /// What the vsock device holds for sockets that do not take it, in bytes.
    pub buffered: usize,
    /// Descriptors that the event loop watches or has ready to be watched.
    pub watched: usize,
    /// Returns of `KVM_RUN` of all vCPUs.
    pub exits: u64,
    /// When the vsock device had a packet of the guest's last; `None` if it never had.
    pub heard: Option<Instant>,
}

/// Keeps the first reason and wakes the device loop with it; and what else the two sides tell each other.
pub(crate) struct Outcome {
    reason: Mutex<Option<ExitReason>>,
    waker: Waker,
    /// The time that workloads are left.
    power_off: Mutex<Option<Duration>>,
    /// The agent is to be asked for its counters.
    counters: AtomicBool,
    /// Wakes the loop to look at both.
    bell: Waker,
    metrics: Mutex<Metrics>,
    /// Not in `metrics`, which the device loop writes when it goes to sleep.
    exits: AtomicU64,
}

impl Outcome {
    pub(crate) fn new(waker: Waker, bell: Waker) -> Self {
        Self {
            reason: Mutex::new(None),
            waker,
            power_off: Mutex::default(),
            counters: AtomicBool::new(false),
            bell,
            metrics: Mutex::default(),
            exits: AtomicU64::new(0),
        }
    }

    /// Has the device loop ask the agent to switch off.
    pub(crate) fn ask_power_off(&self, grace: Duration) {
        *lock(&self.power_off) = Some(grace);
        self.bell.wake();
    }

    /// Has the device loop ask the agent for its counters.
    pub(crate) fn ask_counters(&self) {
        self.counters.store(true, Ordering::Release);
        self.bell.wake();
    }

    /// What was asked since the last call: the time for a power-off, and whether counters are wanted.
    pub(crate) fn take_asked(&self) -> (Option<Duration>, bool) {
        // Before looking: what is asked from here on rings again.
        self.bell.drain();
        (
            lock(&self.power_off).take(),
            self.counters.swap(false, Ordering::Acquire),
        )
    }

    pub(crate) fn bell(&self) -> &Waker {
        &self.bell
    }

    pub(crate) fn publish(&self, metrics: Metrics, now: Instant) {
        let mut last = lock(&self.metrics);
        let heard = match metrics.vsock.tx_packets == last.vsock.tx_packets {
            true => last.heard,
            false => Some(now),
        };
        *last = Metrics { heard, ..metrics };
    }

    pub(crate) fn metrics(&self) -> Metrics {
        Metrics {
            exits: self.exits.load(Ordering::Relaxed),
            ..*lock(&self.metrics)
        }
    }

    /// A vCPU has come back from the guest.
    pub(crate) fn count_exit(&self) {
        self.exits.fetch_add(1, Ordering::Relaxed);
    }

    /// Records `reason` unless there is one already; whoever ends the machine first has said why.
    pub(crate) fn end(&self, reason: ExitReason) {
        lock(&self.reason).get_or_insert(reason);
        self.waker.wake();
    }

    pub(crate) fn waker(&self) -> &Waker {
        &self.waker
    }

    pub(crate) fn reason(&self) -> Option<ExitReason> {
        lock(&self.reason).clone()
    }
}

/// Locks a mutex whose data is whole after any panic of a holder (one assignment each).
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_reason_is_kept() {
        let outcome = Outcome::new(Waker::new().unwrap(), Waker::new().unwrap());
        assert_eq!(outcome.reason(), None);
        outcome.end(ExitReason::Reset);
        outcome.end(ExitReason::Stopped);
        assert_eq!(outcome.reason(), Some(ExitReason::Reset));
    }
}
