//! What the tests said when they ran last, kept beside cargo's output for `cases`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::binaries::TestBinary;
use crate::error::{Error, Result};
use crate::place::{Place, write_whole};

/// How a test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// As it should.
    Passed,
    /// It did not hold.
    Failed,
    /// It was not run because its source says so.
    Ignored,
    /// There is no such test.
    Absent,
}

/// The results of one test program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The stamp of the program that gave them.
    stamp: String,
    /// Test name -> outcome.
    pub outcomes: BTreeMap<String, Outcome>,
}

/// All results, by program.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Results {
    /// Package and target -> its report.
    pub reports: BTreeMap<String, Report>,
}

impl Results {
    fn path(place: &Place) -> PathBuf {
        place.target.join("test-results.json")
    }

    /// What is kept; nothing when it cannot be read, since it can be had again.
    pub fn load(place: &Place) -> Self {
        std::fs::read(Self::path(place))
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default()
    }

    /// Keeps them.
    pub fn save(&self, place: &Place) -> Result<()> {
        let text = serde_json::to_vec_pretty(self)
            .map_err(|error| Error::Invalid(format!("write results: {error}")))?;
        write_whole(&Self::path(place), &text)
    }

    /// Takes in what libtest's log file says of one program, in place of (`whole`) or over what was known of it.
    pub fn take(&mut self, binary: &TestBinary, log: &str, whole: bool) -> Result<()> {
        let stamp = binary.stamp()?;
        let report = self.reports.entry(binary.name()).or_default();
        if whole || report.stamp != stamp {
            *report = Report {
                stamp,
                outcomes: BTreeMap::new(),
            };
        }
        report.outcomes.extend(parse(log));
        Ok(())
    }

    /// Whether the program's results are of this very build.
    pub fn current(&self, binary: &TestBinary) -> bool {
        self.reports
            .get(&binary.name())
            .is_some_and(|report| binary.stamp().is_ok_and(|stamp| stamp == report.stamp))
    }

    /// How one test ended.
    pub fn outcome(&self, binary: &str, test: &str) -> Outcome {
        self.reports
            .get(binary)
            .and_then(|report| report.outcomes.get(test))
            .copied()
            .unwrap_or(Outcome::Absent)
    }
}

/// The lines of libtest's log file: `ok NAME`, `failed NAME`, `ignored NAME` (with its reason after a comma).
pub fn parse(log: &str) -> impl Iterator<Item = (String, Outcome)> {
    log.lines().filter_map(|line| {
        let (word, name) = line.split_once(' ')?;
        let outcome = match word.trim_end_matches(',') {
            "ok" => Outcome::Passed,
            "ignored" => Outcome::Ignored,
            _ => Outcome::Failed,
        };
        Some((name.to_owned(), outcome))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_file_gives_outcomes() {
        let log = "ok exec::ex01_a\nfailed exec::ex02_b\nignored exec::ex03_c\n";
        let outcomes: Vec<_> = parse(log).collect();
        assert_eq!(outcomes[0], ("exec::ex01_a".into(), Outcome::Passed));
        assert_eq!(outcomes[1], ("exec::ex02_b".into(), Outcome::Failed));
        assert_eq!(outcomes[2], ("exec::ex03_c".into(), Outcome::Ignored));
    }
}
