//! The way down: workloads are asked to end, then killed; their clients get the records, a goodbye, and time to take
//! both.
//!
//! ```text
//!   power_off --> ending: SIGTERM, grace, cgroup.kill --> parting: goodbye, half-closed --> down
//!                   until every record is written            until every client hung up
//! ```
//!
//! Each stage has a deadline, whatever workloads and clients do.

use vmm_events::TimerId;
use vmm_protocol::{CancelReason, DownReason, GoodbyeCode};

use crate::agent::{Agent, Due, last_words, rearm};
use crate::platform::Platform;

/// Beyond the grace, until the records are written.
const SETTLE_NS: u64 = 500_000_000;
/// Until every client has hung up.
const PARTING_NS: u64 = 500_000_000;
/// What every client is told.
pub(crate) const GOODBYE: &str = "the guest goes down";

/// A guest that was told to switch off.
#[derive(Default)]
pub(crate) struct Leaving {
    /// Its workloads are gone, or had their time.
    parting: bool,
    timer: Option<(u64, TimerId)>,
}

impl<P: Platform> Agent<'_, P> {
    /// Told to switch off, with the time that workloads have after `SIGTERM`.
    pub(crate) fn power_off(&mut self, grace_ns: u64) {
        let until = self.now().saturating_add(grace_ns);
        let until = until.saturating_add(SETTLE_NS);
        let (timers, epoch) = (&mut self.timers, self.epoch);
        let leaving = self.leaving.get_or_insert_default();
        if leaving.parting {
            return;
        }
        // Told again, it may have less time but not more.
        let until = leaving.timer.map_or(until, |(at, _)| at.min(until));
        rearm(timers, &mut leaving.timer, Some(until), epoch, Due::Leaving);
        let execs: Vec<u64> = self.execs.keys().copied().collect();
        for number in execs {
            self.exec(number, |running, _, now| {
                running.state.cancel(CancelReason::Terminate, grace_ns, now);
            });
        }
    }

    /// The time of a stage is over.
    pub(crate) fn leaving_due(&mut self) {
        if let Some(leaving) = &mut self.leaving {
            leaving.timer = None;
            self.down |= leaving.parting;
            self.part();
        }
    }

    /// Goes on to the next stage as soon as nothing holds this one up.
    pub(crate) fn leave(&mut self) {
        let Some(leaving) = &self.leaving else { return };
        let mut execs = self.execs.values();
        if !leaving.parting && execs.all(|exec| exec.ended && exec.links.is_empty()) {
            self.part();
        }
        let parting = self.leaving.as_ref().is_some_and(|leaving| leaving.parting);
        self.down |= parting && self.connections.is_empty();
    }

    /// Says goodbye to every client.
    fn part(&mut self) {
        let until = self.now().saturating_add(PARTING_NS);
        let (timers, epoch) = (&mut self.timers, self.epoch);
        let Some(leaving) = &mut self.leaving else {
            return;
        };
        if std::mem::replace(&mut leaving.parting, true) {
            return;
        }
        rearm(timers, &mut leaving.timer, Some(until), epoch, Due::Leaving);
        let sessions: Vec<u64> = self.connections.keys().copied().collect();
        for key in sessions {
            if let Some(connection) = self.connections.get_mut(&key) {
                connection.part(GoodbyeCode::GoingDown, GOODBYE);
            }
            self.flush(key);
        }
    }

    /// The last act.
    pub(crate) fn go_down(&mut self) {
        for exec in self.execs.values_mut() {
            exec.running.kill();
        }
        last_words(DownReason::PowerOff, "told to");
    }
}
