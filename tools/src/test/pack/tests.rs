//! What is packed, under which names, and what the runner does with it.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output as Ended, Stdio};

use super::archive::Output;
use super::*;

/// A checkout of the fewest files, with a program that has two tests.
fn checkout() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (path, text) in [
        ("LICENSE", "words"),
        ("docs/operate.md", "# Operating"),
        ("docs/examples/client.py", "pass"),
        ("tests/needs", "# of tests\npython3 one\n"),
        ("built/vmm", "monitor"),
        ("built/machine_boot-12ab", "program"),
        ("image/vmlinux", "elf"),
        ("image/vmlinuz", "bz"),
        ("image/initramfs.cpio", "070701"),
        ("image/other", "nobody's"),
    ] {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    folder
}

fn pack(folder: &Path, name: &str) -> Result<PathBuf> {
    let output = Output::at(&folder.join(name))?;
    let parts = Parts {
        workspace: folder,
        vmm: &folder.join("built/vmm"),
        image: &folder.join("image"),
        commit: "abc123".into(),
        programs: vec![Program {
            name: "machine_boot".into(),
            file: folder.join("built/machine_boot-12ab"),
            tests: vec!["one".into(), "deep::two".into()],
        }],
    };
    output.write(&parts.contents()?)?;
    Ok(folder.join(name))
}

/// Path, mode and content of each entry.
fn unpack(file: &Path) -> Vec<(String, u32, String)> {
    let opened = File::open(file).unwrap();
    let reader: Box<dyn Read> = if file.to_str().unwrap().ends_with("gz") {
        Box::new(flate2::read::GzDecoder::new(opened))
    } else {
        Box::new(opened)
    };
    let mut archive = tar::Archive::new(reader);
    let entries = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().to_str().unwrap().to_owned();
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        (path, entry.header().mode().unwrap(), text)
    });
    entries.collect()
}

#[test]
fn an_archive_has_all_that_the_tests_need_and_no_absolute_path() {
    let folder = checkout();
    for name in ["plain.tar", "small.tar.gz", "small.tgz"] {
        let file = pack(folder.path(), name).unwrap();
        let entries = unpack(&file);
        let shape: Vec<(&str, u32)> = entries
            .iter()
            .map(|(path, mode, _)| (path.as_str(), *mode))
            .collect();
        let expected = [
            ("vmm-tests/COMMIT", 0o644),
            ("vmm-tests/LICENSE", 0o644),
            ("vmm-tests/bin/vmm", 0o755),
            ("vmm-tests/docs/examples/client.py", 0o644),
            ("vmm-tests/docs/operate.md", 0o644),
            ("vmm-tests/image/initramfs.cpio", 0o644),
            ("vmm-tests/image/vmlinux", 0o644),
            ("vmm-tests/image/vmlinuz", 0o644),
            ("vmm-tests/run", 0o755),
            ("vmm-tests/tests/bin/machine_boot", 0o755),
            ("vmm-tests/tests/needs", 0o644),
            ("vmm-tests/tests/programs", 0o644),
        ];
        assert_eq!(shape, expected, "{name}");
        let text = |path: &str| {
            let path = format!("vmm-tests/{path}");
            &entries.iter().find(|entry| entry.0 == path).unwrap().2
        };
        assert_eq!(text("tests/programs"), "machine_boot 2\n");
        assert_eq!(text("tests/bin/machine_boot"), "program");
        assert_eq!(text("run"), RUN);
        let machine = folder.path().to_str().unwrap();
        for (path, _, content) in &entries {
            assert!(!content.contains(machine), "{path} names {machine}");
        }
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o644);
    }
}

#[test]
fn a_name_that_cannot_be_used_is_refused_by_name_and_nothing_is_left() {
    let folder = checkout();
    let taken = pack(folder.path(), "taken.tar").unwrap();
    let before = fs::read(&taken).unwrap();
    for (name, why) in [
        ("taken.tar", "there already"),
        ("missing/a.tar", "is missing"),
        ("LICENSE/a.tar", "is missing"),
        ("a.zip", ".tar.gz"),
        ("..", ".tar.gz"),
    ] {
        let error = pack(folder.path(), name).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(why), "{error}");
    }
    assert_eq!(fs::read(&taken).unwrap(), before);

    // One that comes while it is written stays; a part that is missing leaves nothing.
    let late = folder.path().join("late.tar");
    let output = Output::at(&late).unwrap();
    fs::write(&late, "theirs").unwrap();
    let error = output.write(&Contents::default()).unwrap_err();
    assert!(error.to_string().contains("late.tar"), "{error}");
    assert_eq!(fs::read(&late).unwrap(), b"theirs");
    fs::remove_file(folder.path().join("image/vmlinuz")).unwrap();
    let error = pack(folder.path(), "half.tar").unwrap_err();
    assert!(error.to_string().contains("vmlinuz"), "{error}");
    let archives: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.contains("tar") || name.starts_with('.'))
        .collect();
    assert_eq!(archives.len(), 2, "{archives:?}");
}

#[test]
fn paths_that_lead_elsewhere_are_refused() {
    let mut contents = Contents::default();
    for path in ["/etc/passwd", "../up", "a/../../b", "a//b", "./a", ""] {
        contents.text(path, 0o644, "").unwrap_err();
    }
    contents.text("a/b", 0o644, "").unwrap();
    contents.text("a/b", 0o644, "").unwrap_err();
    assert_eq!(contents.paths(), ["a/b"]);
}

#[test]
fn a_program_that_knows_where_it_was_built_is_found_out() {
    assert!(holds(b"..//work/tests/docs", b"/work/tests"));
    assert!(!holds(b"/work/test", b"/work/tests"));
    assert!(!holds(b"", b"/work"));
}

#[test]
fn each_need_is_of_a_test_that_exists() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut source = String::new();
    for folder in ["tests/machine", "tests/fast"] {
        for entry in fs::read_dir(workspace.join(folder)).unwrap() {
            source += &fs::read_to_string(entry.unwrap().path()).unwrap();
        }
    }
    let needs = fs::read_to_string(workspace.join("tests/needs")).unwrap();
    for line in needs.lines().filter(|line| !line.starts_with('#')) {
        let (need, test) = line.split_once(' ').unwrap();
        assert!(source.contains(&format!("fn {test}()")), "{test}");
        assert!(RUN.contains(&format!("\n        {need})\n")), "{need}");
    }
}

/// An unpacked archive whose programs are scripts.
struct Unpacked(tempfile::TempDir);

impl Unpacked {
    fn new(programs: &[(&str, u32, &str)]) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        // A device that anybody may open, in place of one that is not everywhere.
        folder.script("run", &RUN.replace("/dev/kvm", "/dev/null"));
        folder.script("bin/vmm", "#!/bin/sh\necho a report\n");
        folder.script("COMMIT", "abc123\n");
        folder.script("tests/needs", "# words\npython3 b\n");
        let mut list = String::new();
        for (name, count, script) in programs {
            folder.script(
                &format!("tests/bin/{name}"),
                &format!("#!/bin/sh\n{script}\n"),
            );
            list += &format!("{name} {count}\n");
        }
        folder.script("tests/programs", &list);
        folder
    }

    fn script(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // By another process: a child of a thread beside this one could hold a descriptor of ours open, and a program
        // that is open for writing is not run (ETXTBSY).
        let script = "printf %s \"$2\" >\"$1\" && chmod 755 \"$1\"";
        let mut sh = Command::new("sh");
        sh.args(["-c", script, "sh"]).arg(&path).arg(text);
        assert!(sh.status().unwrap().success(), "{}", path.display());
    }

    fn run(&self, arguments: &[&str]) -> Ended {
        let mut run = Command::new("sh");
        run.arg(self.0.path().join("run"))
            .args(arguments)
            .stdin(Stdio::null());
        run.output().unwrap()
    }
}

/// A report of libtest.
fn report(passed: u32, failed: u32, ignored: u32, filtered: u32) -> String {
    let word = if failed == 0 { "ok" } else { "FAILED" };
    format!(
        "echo 'test result: {word}. {passed} passed; {failed} failed; {ignored} ignored; 0 measured; {filtered} \
         filtered out; finished in 0.01s'; exit {}",
        if failed == 0 { 0 } else { 101 }
    )
}

fn last_line(ended: &Ended) -> String {
    let text = String::from_utf8_lossy(&ended.stdout);
    let line = text.lines().last().unwrap_or_default();
    line.split(" on host (").next().unwrap().to_owned()
}

fn errors(ended: &Ended) -> String {
    String::from_utf8_lossy(&ended.stderr).into_owned()
}

#[test]
fn the_runner_adds_up_and_says_so_last() {
    let folder = Unpacked::new(&[
        ("one", 3, &report(3, 0, 0, 0)),
        ("two", 4, &report(1, 0, 1, 2)),
    ]);
    let ended = folder.run(&["--kvm", "host", "two"]);
    assert_eq!(ended.status.code(), Some(0), "{}", errors(&ended));
    assert_eq!(last_line(&ended), "machine tests: 4 passed, 1 ignored");
    let text = String::from_utf8_lossy(&ended.stdout);
    assert!(text.trim_end().ends_with(", release)"), "{text}");
    assert!(errors(&ended).contains("abc123"));
}

#[test]
fn the_runner_gives_the_tests_their_surroundings() {
    let script = format!(
        "pwd >&2; echo \"$VMM_KVM $VMM_PATIENCE [$*] [$VMM_DIR]\" >&2
         test -x \"$VMM_BIN\" && test \"$CARGO_MANIFEST_DIR\" = \"$(pwd)\" && cat && {}",
        report(1, 0, 0, 0)
    );
    let folder = Unpacked::new(&[("one", 1, &script)]);
    let ended = folder.run(&["--patience=10", "--without", "python3", "b"]);
    assert_eq!(ended.status.code(), Some(0), "{}", errors(&ended));
    let said = errors(&ended);
    assert!(
        said.contains("host 10 [--test-threads=1 b --skip b] []\n"),
        "{said}"
    );
    assert_eq!(
        last_line(&ended),
        "machine tests: 1 passed, 1 left out for --without python3"
    );
}

#[test]
fn the_runner_fails_for_a_failed_an_unfinished_and_a_silent_program_and_for_no_test_at_all() {
    for (count, script, words) in [
        (2, report(1, 1, 0, 0), "one (status 101)"),
        (2, report(2, 0, 0, 0) + "3", "one (status 3)"),
        (3, report(2, 0, 0, 0), "one (not all of its 3 tests)"),
        (1, "echo words; exit 0".into(), "one (no result)"),
        (1, "kill -9 $$".into(), "one (no result)"),
        (2, report(0, 0, 0, 2), "no test was run"),
    ] {
        let script = script.replace("exit 03", "exit 3");
        let folder = Unpacked::new(&[("one", count, &script), ("two", 0, &report(0, 0, 0, 0))]);
        let ended = folder.run(&[]);
        assert_eq!(ended.status.code(), Some(1), "{script}: {}", errors(&ended));
        assert!(
            errors(&ended).contains(words),
            "{script}: {}",
            errors(&ended)
        );
        assert!(last_line(&ended).starts_with("machine tests: "), "{script}");
    }
}

#[test]
fn the_runner_names_every_missing_thing_before_it_runs_anything() {
    let folder = Unpacked::new(&[("one", 1, "echo ran >&2")]);
    folder.script("tests/needs", "python3 b\nsystemd b\nroot b\nmoon c\n");
    // Nothing is on this PATH but what the runner itself is made of.
    let tools = folder.0.path().join("tools");
    fs::create_dir(&tools).unwrap();
    for (name, script) in [("id", "echo 1000"), ("dirname", "echo \"${2%/*}\"")] {
        folder.script(&format!("tools/{name}"), &format!("#!/bin/sh\n{script}\n"));
    }
    let run = RUN
        .replace("/dev/kvm", "/dev/nowhere")
        .replace("/lib/systemd/systemd", "/nowhere");
    folder.script("run", &run);
    let ended = Command::new("/bin/sh")
        .arg(folder.0.path().join("run"))
        .env("PATH", &tools)
        .output()
        .unwrap();
    let said = errors(&ended);
    assert_eq!(ended.status.code(), Some(125), "{said}");
    for words in [
        "/dev/nowhere is missing: load kvm_intel",
        "python3 is missing: apt-get install python3; or leave its tests out: --without python3",
        "systemd is missing",
        "root is missing: run this with sudo",
        "the need moon",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert!(!said.contains("ran"), "{said}");

    folder.script("run", &RUN.replace("/dev/kvm", "/dev/null"));
    folder.script(
        "bin/vmm",
        "#!/bin/sh\necho kvm no-hardware: words; exit 1\n",
    );
    folder.script("tests/needs", "");
    let ended = folder.run(&[]);
    assert_eq!(ended.status.code(), Some(125));
    assert!(errors(&ended).contains("no-hardware"), "{}", errors(&ended));
    assert!(!errors(&ended).contains("ran"));
}

#[test]
fn the_runner_refuses_what_it_does_not_know() {
    let folder = Unpacked::new(&[("one", 1, "echo ran >&2")]);
    for (arguments, words) in [
        (&["--kvm", "nest"][..], "--kvm nest"),
        (&["--kvm=auto"], "--kvm auto"),
        (&["--kvm"], "--kvm needs a value"),
        (&["--patience", "0"], "--patience 0"),
        (&["--patience", "101"], "--patience 101"),
        (&["--patience", "x"], "--patience x"),
        (&["--without", "moon"], "--without moon"),
        (&["--verbose"], "--verbose"),
        (&["a b"], "'a b'"),
        (&["a", "b"], "a and b"),
        (&[""], "the filter ''"),
    ] {
        let ended = folder.run(arguments);
        assert_eq!(ended.status.code(), Some(125), "{arguments:?}");
        assert!(errors(&ended).contains(words), "{}", errors(&ended));
        assert!(!errors(&ended).contains("ran"), "{arguments:?}");
    }
    let ended = folder.run(&["--help"]);
    assert!(ended.status.success() && ended.stdout.starts_with(b"usage: run"));
}
