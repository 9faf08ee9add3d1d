//! The part of `bench exec` that is measured in a busy guest.
//!
//! ```text
//!   nineteen echos at once          request to first byte, the median
//!   the same beside `yes`           compared: what a flood costs others
//!   a cancel under load             to the record, beyond the grace where it was used up
//!   a kill under load               the same
//!   stdin of cat                    MB/s
//!   thousands of execs in a row     the agent's memory before and after
//! ```

use crate::bench::report;
use crate::bench::stats::{Ratio, Summary};
use crate::error::Result;
use crate::kvm::Kvm;
use crate::say;

/// A first byte beside a flood: at most this many times one without it.
const FLOOD_TARGET: f64 = 2.0;
/// A cancel settles within its grace and this, in ms, where the processor is real; in the nest within ten times as much.
const SETTLE_MS: f64 = 500.0;
/// The agent's memory without stored output.
const MEMORY: u64 = 4 << 20;
/// Its growth over all the execs, which is none: pages that a first use touches are not what it is about.
const GROWTH: u64 = 128 << 10;

#[derive(Default, serde::Serialize, serde::Deserialize)]
pub struct Samples {
    others_ms: Vec<f64>,
    flooded_ms: Vec<f64>,
    cancel_ms: Vec<f64>,
    kill_ms: Vec<f64>,
    stdin_mb_s: Vec<f64>,
    execs: u32,
    resident_bytes: [u64; 2],
}

impl Samples {
    fn flood(&self) -> Ratio {
        Ratio::of(&self.flooded_ms, &self.others_ms)
    }

    /// The targets that were missed, in words.
    pub fn missed(&self, kvm: Kvm) -> Vec<String> {
        let mut missed = Vec::new();
        let flood = self.flood().upper_95;
        if flood > FLOOD_TARGET {
            missed.push(format!(
                "first byte beside a flood: {flood:.2} of one without is above {FLOOD_TARGET:.2}"
            ));
        }
        let [cancel, allowed] = [Summary::of(&self.cancel_ms).p99, allowed(kvm)];
        if cancel > allowed {
            missed.push(format!(
                "cancel: p99 is {cancel:.0} ms beyond the grace, more than {allowed:.0}"
            ));
        }
        let [before, after] = self.resident_bytes;
        if before.max(after) > MEMORY || after > before + GROWTH {
            missed.push(format!(
                "the agent's memory: {before} bytes, {after} after {} execs",
                self.execs
            ));
        }
        missed
    }

    /// Prints it.
    pub fn tell(&self, kvm: Kvm) -> Result<()> {
        for (name, series) in [
            ("19 at once", &self.others_ms),
            ("beside a flood", &self.flooded_ms),
            ("cancel settles", &self.cancel_ms),
            ("kill settles", &self.kill_ms),
        ] {
            say::data(report::row(name, &Summary::of(series)))?;
        }
        let stdin = Summary::of(&self.stdin_mb_s);
        say::data(format!(
            "stdin          median {:.1} MB/s, best {:.1}",
            stdin.p50, stdin.max
        ))?;
        let flood = self.flood();
        say::data(format!(
            "flooded/alone  {:.3}, below {:.3} with 95 % (target {FLOOD_TARGET:.2})",
            flood.median, flood.upper_95
        ))?;
        say::data(format!(
            "cancel p99     at most {:.0} ms beyond the grace is asked here",
            allowed(kvm)
        ))?;
        let [before, after] = self.resident_bytes;
        say::data(format!(
            "agent's memory {before} bytes, {after} after {} execs (target: flat, at most {MEMORY})",
            self.execs
        ))
    }
}

fn allowed(kvm: Kvm) -> f64 {
    match kvm {
        Kvm::Host => SETTLE_MS,
        Kvm::Nest => 10.0 * SETTLE_MS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_target_is_judged_by_itself() {
        let good = || Samples {
            others_ms: vec![10.0; 20],
            flooded_ms: vec![15.0; 20],
            cancel_ms: vec![400.0; 20],
            kill_ms: vec![1.0; 20],
            stdin_mb_s: vec![1.0; 20],
            execs: 10,
            resident_bytes: [1 << 20, 1 << 20],
        };
        assert_eq!(good().missed(Kvm::Host), Vec::<String>::new());
        let mut slow = good();
        slow.flooded_ms = vec![21.0; 20];
        assert_eq!(slow.missed(Kvm::Host).len(), 1);
        let mut late = good();
        late.cancel_ms[19] = 501.0;
        assert_eq!(late.missed(Kvm::Host).len(), 1);
        assert_eq!(late.missed(Kvm::Nest), Vec::<String>::new());
        for resident_bytes in [[1 << 20, 2 << 20], [5 << 20, 5 << 20]] {
            let large = Samples {
                resident_bytes,
                ..good()
            };
            assert_eq!(large.missed(Kvm::Host).len(), 1, "{resident_bytes:?}");
        }
    }
}
