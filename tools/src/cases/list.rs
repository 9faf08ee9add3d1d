//! Reads the list of cases.

use std::collections::BTreeSet;
use std::fs;

use serde::Deserialize;

use crate::error::{Error, Naming, Result};
use crate::place::Place;

/// The list, in the checkout.
pub const FILE: &str = "tests/cases.toml";

/// One case.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Two capital letters and two digits.
    pub id: String,
    /// What happens and what must come of it, in plain words.
    pub what: String,
    /// The tests that show it.
    #[serde(default)]
    pub tests: Vec<Test>,
    /// The test that must fail when the protection is taken away (`VMM_NEGATIVE_CONTROL=<id>`).
    pub control: Option<Test>,
}

/// One test of a case.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Test {
    /// What it needs.
    pub level: Level,
    /// Its package.
    pub package: String,
    /// `lib`, or the name of a program or of an integration test.
    #[serde(default = "library")]
    pub target: String,
    /// The test's path in its target.
    pub name: String,
}

fn library() -> String {
    "lib".into()
}

impl Test {
    /// Package and target, as test programs are named.
    pub fn binary(&self) -> String {
        format!("{} {}", self.package, self.target)
    }
}

/// What a test needs; the lowest that shows a case is the right one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Nothing: a function of its arguments.
    Pure,
    /// The real agent and client over a socket pair.
    Loopback,
    /// A guest of our own on a KVM of any kind.
    Fast,
    /// A real kernel in a real machine.
    Machine,
}

impl Level {
    /// Its name in the list.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pure => "pure",
            Self::Loopback => "loopback",
            Self::Fast => "fast",
            Self::Machine => "machine",
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    case: Vec<Case>,
}

/// The whole list.
pub fn load(place: &Place) -> Result<Vec<Case>> {
    let path = place.workspace.join(FILE);
    let text = fs::read_to_string(&path).naming(|| format!("read {}", path.display()))?;
    parse(&text).map_err(|what| Error::malformed(path, what))
}

/// The list in `text`, or what is wrong with it.
pub fn parse(text: &str) -> std::result::Result<Vec<Case>, String> {
    let list: List = toml::from_str(text).map_err(|error| error.to_string())?;
    let mut seen = BTreeSet::new();
    for case in &list.case {
        let shaped = matches!(
            case.id.as_bytes(),
            [b'A'..=b'Z', b'A'..=b'Z', b'0'..=b'9', b'0'..=b'9']
        );
        if !shaped {
            return Err(format!(
                "{:?} is not a case's id: two capital letters and two digits",
                case.id
            ));
        }
        if !seen.insert(case.id.as_str()) {
            return Err(format!("{} is listed twice", case.id));
        }
        if case.what.trim().is_empty() {
            return Err(format!("{} has no words", case.id));
        }
    }
    Ok(list.case)
}

/// Whether a test's function is named after a case: `ex01_` and words after it.
pub fn named_after_a_case(name: &str) -> bool {
    let function = name.rsplit("::").next().unwrap_or(name);
    matches!(
        function.as_bytes(),
        [b'a'..=b'z', b'a'..=b'z', b'0'..=b'9', b'0'..=b'9', b'_', ..]
    )
}
