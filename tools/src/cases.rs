//! The project's list of cases, `tests/cases.toml`: each a fault that a system of this kind has had, with the tests
//! that show it is not one of ours.
//!
//! A case fails when it has no test, or when one of its tests failed, was ignored or does not exist. A test that is
//! named after a case (`ex01_...`) and not listed fails too, so that the list stays whole.

mod list;

use std::collections::BTreeSet;

use crate::error::{Error, Result};
use crate::place::Place;
use crate::say;
use crate::test::binaries::{self, Selection};
use crate::test::results::{Outcome, Results};
use crate::test::{self, Step};

use list::{Case, Level, Test};

/// Prints every case with its tests, their level and result; runs first what has not run since it was built.
pub fn show(place: &Place, wish: crate::kvm::Wish) -> Result<()> {
    let cases = list::load(place)?;
    let results = Results::load(place);
    let stale = |selection: &Selection, machine: bool| -> Result<bool> {
        let programs = binaries::build(place, selection)?;
        Ok(cases
            .iter()
            .flat_map(|case| &case.tests)
            .filter(|test| (test.level == Level::Machine) == machine)
            .any(|test| {
                programs
                    .iter()
                    .find(|binary| binary.name() == test.binary())
                    .is_none_or(|binary| !results.current(binary))
            }))
    };
    let mut steps = Vec::new();
    if stale(&Selection::Workspace, false)? {
        steps.push(Step::Unit);
    }
    if stale(&Selection::Machines, true)? {
        steps.push(Step::Machine);
    }
    if !steps.is_empty() {
        // A failed test is told case by case below.
        match test::run(
            place,
            &test::Options {
                wish,
                steps,
                filter: None,
            },
        ) {
            Ok(()) | Err(Error::Check(_)) => {}
            Err(error) => return Err(error),
        }
    }
    let results = Results::load(place);
    let faults = faults(&cases, &results);
    for case in &cases {
        say::data(describe(case, &results))?;
    }
    conclude(&cases, &faults)
}

/// Fails when a case does, by the results that are kept.
pub fn check(place: &Place) -> Result<()> {
    let cases = list::load(place)?;
    conclude(&cases, &faults(&cases, &Results::load(place)))
}

/// Runs every negative control: with a protection taken away by a test-only switch, its test must fail.
pub fn negative(place: &Place) -> Result<()> {
    let cases = list::load(place)?;
    let controls: Vec<(&Case, &Test)> = cases
        .iter()
        .flat_map(|case| case.control.iter().map(move |test| (case, test)))
        .collect();
    let mut faults = Vec::new();
    let packages: BTreeSet<&str> = controls
        .iter()
        .map(|(_, test)| test.package.as_str())
        .collect();
    for package in packages {
        let programs = binaries::build(place, &Selection::Negative(package.to_owned()))?;
        for (case, test) in controls.iter().filter(|(_, test)| test.package == package) {
            let Some(program) = programs
                .iter()
                .find(|program| program.name() == test.binary())
            else {
                faults.push(format!("{}: no test program {}", case.id, test.binary()));
                continue;
            };
            let with = program.run_one(&test.name, None)?;
            let without = program.run_one(&test.name, Some(("VMM_NEGATIVE_CONTROL", &case.id)))?;
            if (with, without) == (Outcome::Passed, Outcome::Failed) {
                say::step(format!(
                    "{}: {} is red without its protection",
                    case.id, test.name
                ));
            } else {
                faults.push(format!(
                    "{}: {} {with:?} with its protection and {without:?} without",
                    case.id, test.name
                ));
            }
        }
    }
    if faults.is_empty() {
        Ok(())
    } else {
        Err(Error::Check(faults.join("\n")))
    }
}

/// A case as text.
fn describe(case: &Case, results: &Results) -> String {
    let passed = case
        .tests
        .iter()
        .all(|test| results.outcome(&test.binary(), &test.name) == Outcome::Passed);
    let verdict = if passed && !case.tests.is_empty() {
        "passing"
    } else {
        "FAILING"
    };
    let control = if case.control.is_some() {
        ", with a negative control"
    } else {
        ""
    };
    let mut text = format!("{} {verdict}{control}\n    {}", case.id, case.what.trim());
    for test in &case.tests {
        let outcome = format!("{:?}", results.outcome(&test.binary(), &test.name)).to_lowercase();
        text += &format!(
            "\n    {outcome:8} {:9} {} {}",
            test.level.name(),
            test.binary(),
            test.name
        );
    }
    text
}

/// What is wrong, a line each.
fn faults(cases: &[Case], results: &Results) -> Vec<String> {
    let mut faults = Vec::new();
    for case in cases {
        if case.tests.is_empty() {
            faults.push(format!("{} has no test", case.id));
        }
        for test in &case.tests {
            let outcome = results.outcome(&test.binary(), &test.name);
            if outcome != Outcome::Passed {
                let outcome = format!("{outcome:?}").to_lowercase();
                faults.push(format!(
                    "{}: {} {} is {outcome}",
                    case.id,
                    test.binary(),
                    test.name
                ));
            }
        }
    }
    let listed: BTreeSet<(String, &str)> = cases
        .iter()
        .flat_map(|case| &case.tests)
        .map(|test| (test.binary(), test.name.as_str()))
        .collect();
    for (binary, report) in &results.reports {
        for name in report.outcomes.keys() {
            if list::named_after_a_case(name) && !listed.contains(&(binary.clone(), name.as_str()))
            {
                faults.push(format!(
                    "{binary} {name} is named after a case and not listed in {}",
                    list::FILE
                ));
            }
        }
    }
    faults
}

fn conclude(cases: &[Case], faults: &[String]) -> Result<()> {
    if faults.is_empty() {
        say::step(format!("cases: {} listed, all passing", cases.len()));
        return Ok(());
    }
    Err(Error::Check(format!(
        "{} faults in {} cases:\n{}",
        faults.len(),
        cases.len(),
        faults.join("\n")
    )))
}

#[cfg(test)]
mod tests;
