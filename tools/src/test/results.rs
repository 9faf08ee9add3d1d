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

    /// Takes in what the report of one program says, in place of (`whole`) or over what was known of it.
    pub fn take(&mut self, binary: &TestBinary, report_text: &str, whole: bool) -> Result<()> {
        let stamp = binary.stamp()?;
        let report = self.reports.entry(binary.name()).or_default();
        if whole || report.stamp != stamp {
            *report = Report {
                stamp,
                outcomes: BTreeMap::new(),
            };
        }
        report.outcomes.extend(parse(report_text));
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

/// The results in libtest's report: `test NAME ... ok`, `FAILED` or `ignored`, perhaps with words after it. What the
/// test's own children wrote to the same stream may stand between name and result.
pub fn parse(report: &str) -> Vec<(String, Outcome)> {
    let mut results = Vec::new();
    let mut pending: Option<&str> = None;
    for line in report.lines() {
        let rest = match line
            .strip_prefix("test ")
            .and_then(|rest| rest.split_once(" ... "))
        {
            Some((name, rest)) => {
                pending = Some(name.trim_end_matches(" - should panic"));
                rest
            }
            None => line,
        };
        let Some(name) = pending else { continue };
        let outcome = if rest.ends_with("ok") {
            Outcome::Passed
        } else if rest.ends_with("FAILED") {
            Outcome::Failed
        } else if rest.starts_with("ignored") {
            Outcome::Ignored
        } else {
            continue;
        };
        results.push((name.to_owned(), outcome));
        pending = None;
    }
    results
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_gives_outcomes() {
        let report = "\nrunning 5 tests\ntest exec::ex01_a ... ok\ntest exec::ex02_b ... FAILED\n\
            test ex03_c ... ignored, needs a moon\ntest ex04_d ... noise of a child\nmore ok\n\
            test ex05_e - should panic ... ok\n\nfailures:\n\n---- exec::ex02_b stdout ----\nok\n\n\
            test result: FAILED. 3 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out\n";
        let outcomes = parse(report);
        let expected = [
            ("exec::ex01_a", Outcome::Passed),
            ("exec::ex02_b", Outcome::Failed),
            ("ex03_c", Outcome::Ignored),
            ("ex04_d", Outcome::Passed),
            ("ex05_e", Outcome::Passed),
        ];
        assert_eq!(
            outcomes,
            expected.map(|(name, outcome)| (name.to_owned(), outcome))
        );
    }
}
