//! Tests of the list's reading and of its verdicts.

use super::*;
use crate::test::results::Report;

const LIST: &str = r#"
[[case]]
id = "EX01"
what = "The cap cuts a chunk."
tests = [
    { level = "pure", package = "p", name = "exec::ex01_cap_cuts_a_chunk" },
    { level = "loopback", package = "a", target = "loopback", name = "ex01_cap_cuts_a_chunk" },
]
control = { level = "pure", package = "p", name = "exec::ex01_cap_cuts_a_chunk" }
"#;

fn results(entries: &[(&str, &str, Outcome)]) -> Results {
    let mut results = Results::default();
    for (binary, name, outcome) in entries {
        let report: &mut Report = results.reports.entry((*binary).to_owned()).or_default();
        report.outcomes.insert((*name).to_owned(), *outcome);
    }
    results
}

#[test]
fn a_case_passes_when_all_its_tests_do() {
    let cases = list::parse(LIST).unwrap();
    let all = [
        ("p lib", "exec::ex01_cap_cuts_a_chunk", Outcome::Passed),
        ("a loopback", "ex01_cap_cuts_a_chunk", Outcome::Passed),
        ("p lib", "frame::tests::round_trip", Outcome::Failed),
    ];
    assert!(faults(&cases, &results(&all)).is_empty());
    assert!(
        describe(&cases[0], &results(&all))
            .starts_with("EX01 passing, with a negative control\n    The cap")
    );
    assert!(describe(&cases[0], &results(&all[..1])).starts_with("EX01 FAILING"));
}

#[test]
fn an_ignored_a_failed_an_absent_and_an_unlisted_test_are_faults() {
    let cases = list::parse(LIST).unwrap();
    for outcome in [Outcome::Ignored, Outcome::Failed] {
        let found = faults(
            &cases,
            &results(&[
                ("p lib", "exec::ex01_cap_cuts_a_chunk", outcome),
                ("a loopback", "ex01_cap_cuts_a_chunk", Outcome::Passed),
            ]),
        );
        assert_eq!(found.len(), 1, "{found:?}");
    }
    assert_eq!(faults(&cases, &results(&[])).len(), 2);
    let unlisted = results(&[
        ("p lib", "exec::ex01_cap_cuts_a_chunk", Outcome::Passed),
        ("a loopback", "ex01_cap_cuts_a_chunk", Outcome::Passed),
        ("p lib", "exec::ex02_other", Outcome::Passed),
    ]);
    assert!(faults(&cases, &unlisted)[0].contains("not listed"));
}

#[test]
fn a_case_without_a_test_is_a_fault() {
    let cases = list::parse("[[case]]\nid = \"VS01\"\nwhat = \"x\"\n").unwrap();
    assert_eq!(faults(&cases, &Results::default()), ["VS01 has no test"]);
}

#[test]
fn a_wrong_list_is_refused_by_name() {
    for (text, word) in [
        ("[[case]]\nid = \"EX1\"\nwhat = \"x\"\n", "EX1"),
        ("[[case]]\nid = \"EX01\"\nwhat = \" \"\n", "no words"),
        (
            "[[case]]\nid = \"EX01\"\nwhat = \"x\"\n[[case]]\nid = \"EX01\"\nwhat = \"x\"\n",
            "twice",
        ),
        (
            "[[case]]\nid = \"EX01\"\nwhat = \"x\"\nignored = true\n",
            "ignored",
        ),
    ] {
        let error = list::parse(text).unwrap_err();
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn a_function_named_after_a_case_is_known() {
    assert!(list::named_after_a_case("exec::tests::ex01_words"));
    assert!(!list::named_after_a_case("exec::tests::round_trip"));
    assert!(!list::named_after_a_case("ex01::tests::other"));
}
