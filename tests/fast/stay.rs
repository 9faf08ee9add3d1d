//! Sandboxes that stay, with fast guests: what supervisors and scripts see of them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // All of it is test code.

use std::fs;
use std::io::Read;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;
use vmm_tests::{Ended, Vmm, require_kvm};

/// A state root with a guest that spins until it is ended.
struct Root(tempfile::TempDir);

impl Root {
    fn new() -> Self {
        require_kvm();
        let root = Self(tempfile::tempdir_in("/tmp").unwrap());
        fs::write(root.path("guest.elf"), vmm_guests::ENDS).unwrap();
        root
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn vmm(&self, verb: &str, arguments: &[&str]) -> Vmm {
        Vmm::new(verb)
            .args(["--dir".as_ref(), self.path("r").as_os_str()])
            .args(arguments)
    }

    fn run(&self, verb: &str, arguments: &[&str]) -> Ended {
        self.vmm(verb, arguments).run()
    }

    /// An initramfs with nothing in it, for a guest whose agent never comes.
    fn empty_archive(&self) -> PathBuf {
        let path = self.path("empty.cpio");
        let zeros = "0".repeat(8 * 11);
        let trailer = format!("070701{zeros}0000000b00000000TRAILER!!!\0\0\0\0");
        fs::write(&path, trailer).unwrap();
        path
    }

    fn guest(&self, verb: &str, arguments: &[&str]) -> Vmm {
        let kernel = self.path("guest.elf");
        self.vmm(verb, &["--cmdline", "say=up end=spin", "--kernel"])
            .arg(kernel)
            .args(arguments)
    }

    fn start(&self, arguments: &[&str]) {
        let ended = self
            .guest("start", &["box", "--no-agent", "-d"])
            .args(arguments)
            .run();
        assert_eq!(
            (ended.status, ended.text().as_str()),
            (0, "box\n"),
            "{}",
            ended.stderr
        );
    }

    fn ps(&self) -> Value {
        let ended = self.run("ps", &["--json", "box"]);
        assert_eq!(ended.status, 0, "{}", ended.stderr);
        serde_json::from_str(&ended.text()).unwrap()
    }

    /// Its process comes when it comes; each look is a process of its own.
    fn await_process(&self) {
        let end = Instant::now() + vmm_tests::patience();
        while self.run("metrics", &["box"]).status != 0 {
            assert!(Instant::now() < end, "nobody answers on the control socket");
        }
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.ps()["pid"].as_i64().unwrap()).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        self.run("rm", &["-f", "box"]);
    }
}

fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

#[test]
fn a_life_is_started_seen_stopped_and_removed() {
    let root = Root::new();
    root.start(&[]);
    assert_eq!(root.ps()["state"], "ready");
    // It is ready as soon as it runs: what it says comes when it comes.
    root.vmm("logs", &["-f", "box"])
        .start()
        .stdout
        .wait_for("up");
    assert!(root.run("logs", &["box"]).text().starts_with("up"));
    let exec = root.run("exec", &["box", "--", "true"]);
    assert_eq!(exec.status, 125);
    assert!(exec.stderr.contains("--no-agent"), "{}", exec.stderr);
    // Verbs about an exec have their own statuses, attach that of exec.
    for (verb, arguments, status) in [
        ("attach", &["box", "1"][..], 125),
        ("attach", &["nosuch", "1"], 125),
        ("attach", &["box", "1", "--from", "5"], 125),
        ("exec", &["box", "--detach", "-i", "--", "cat"], 125),
        ("release", &["box", "1"], 4),
        ("cancel", &["box", "1"], 4),
        ("wait", &["box", "1"], 4),
        ("kill", &["box", "1", "-s", "TERM"], 4),
        ("kill", &["box", "-s", "TERM"], 2),
        ("kill", &["box", "1", "-s", "NONE"], 2),
        ("release", &["box", "0"], 2),
        ("release", &["box"], 2),
        ("release", &["nosuch", "1"], 3),
    ] {
        let ended = root.run(verb, arguments);
        assert_eq!(
            ended.status, status,
            "{verb} {arguments:?}: {}",
            ended.stderr
        );
    }
    assert_eq!(root.ps()["state"], "ready", "it runs on");
    assert_eq!(root.run("stop", &["box"]).status, 0);
    assert_eq!(
        root.run("stop", &["box"]).status,
        0,
        "it is stopped already"
    );
    assert_eq!(root.run("kill", &["box"]).status, 4);
    assert_eq!(root.ps()["state"], "ended");
    assert_eq!(root.run("wait", &["box"]).text(), "0\n");
    assert_eq!(root.run("rm", &["box"]).status, 0);
    for verb in ["inspect", "logs", "stop", "kill", "wait", "metrics", "rm"] {
        assert_eq!(root.run(verb, &["box"]).status, 3, "{verb}");
    }
}

#[test]
fn ge08_a_refused_start_leaves_the_first_ones_pid_file_alone() {
    let root = Root::new();
    let pid_file = root.path("pid");
    let flag = ["--pid-file", pid_file.to_str().unwrap()];
    root.start(&flag);
    let pid = fs::read_to_string(&pid_file).unwrap();
    assert_eq!(pid.trim(), root.ps()["pid"].to_string());
    let again = root
        .guest("start", &["box", "--no-agent", "-d"])
        .args(flag)
        .run();
    assert_eq!(again.status, 4, "{}", again.stderr);
    assert_eq!(fs::read_to_string(&pid_file).unwrap(), pid);
    assert_eq!(root.run("stop", &["box"]).status, 0);
    assert!(!exists(&pid_file));
}

#[test]
fn signals_of_a_life_that_stays() {
    let root = Root::new();
    for (signal, end) in [(Signal::TERM, "stopped"), (Signal::INT, "stopped")] {
        root.start(&[]);
        // These are a workload's, and there is none.
        root.signal(Signal::USR1);
        root.signal(Signal::USR2);
        // It has no terminal whose end could be its own.
        root.signal(Signal::HUP);
        assert_eq!(root.ps()["state"], "ready");
        root.signal(signal);
        let ended = root.run("wait", &["box", "--json"]);
        let record: Value = serde_json::from_str(&ended.text()).unwrap();
        assert_eq!(
            (&record["end"], &record["status"]),
            (&end.into(), &0.into()),
            "{record}"
        );
    }
}

#[test]
fn a_full_control_socket_keeps_no_sandbox_from_being_ended_with_a_record() {
    let root = Root::new();
    for (verb, end) in [("stop", "stopped"), ("kill", "stopped")] {
        root.start(&[]);
        let generation = root.ps()["generation"].as_str().unwrap().to_owned();
        let folder = root.path("r/box");
        let socket = fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().path().join("control.sock"))
            .find(|path| exists(path))
            .unwrap();
        // As many as it takes, all silent.
        let silent: Vec<_> = (0..64)
            .map(|_| UnixStream::connect(&socket).unwrap())
            .collect();
        let ended = root.run("metrics", &["box"]);
        assert_ne!(ended.status, 0, "there is room: {}", ended.text());
        let ended = root.run(verb, &["box"]);
        assert_eq!(ended.status, 0, "{}", ended.stderr);
        drop(silent);
        let ended = root.run("wait", &["box", "--json"]);
        let record: Value = serde_json::from_str(&ended.text()).unwrap();
        assert_eq!(
            (&record["end"], &record["generation"]),
            (&end.into(), &generation.into()),
            "{record}"
        );
    }
}

#[test]
fn systemd_is_told_when_it_is_ready_and_when_it_stops() {
    let root = Root::new();
    let path = root.path("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket
        .set_read_timeout(Some(vmm_tests::patience()))
        .unwrap();
    let vmm = root
        .guest("start", &["box", "--no-agent"])
        .env("NOTIFY_SOCKET", &path)
        .start();
    let heard = || {
        let mut text = [0; 64];
        let length = socket.recv(&mut text).unwrap();
        String::from_utf8_lossy(&text[..length]).into_owned()
    };
    assert_eq!(heard(), "READY=1");
    vmm.signal(Signal::TERM);
    assert_eq!(heard(), "STOPPING=1");
    assert_eq!(vmm.end().status, 0);
}

#[test]
fn a_ready_descriptor_has_its_line_and_the_log_is_json_where_asked() {
    let root = Root::new();
    let ready = root.path("ready");
    mknodat(CWD, &ready, FileType::Fifo, Mode::RWXU, 0).unwrap();
    let reader = thread::spawn({
        let ready = ready.clone();
        move || {
            // To its end, which comes with the sandbox running.
            let mut said = String::new();
            let mut reader = fs::File::open(ready).unwrap();
            reader.read_to_string(&mut said).unwrap();
            said
        }
    });
    let script = r#"ready=$1; shift; exec "$@" 7>"$ready""#;
    let life = Command::new("sh")
        .args(["-c", script, "sh"])
        .arg(&ready)
        .arg(Vmm::binary())
        .args(["start", "box", "--no-agent", "--cmdline", "end=spin"])
        .args(["--ready-fd", "7", "--log-format", "json"])
        .args(["--log-level", "info", "--kernel"])
        .arg(root.path("guest.elf"))
        .arg("--dir")
        .arg(root.path("r"))
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    assert_eq!(reader.join().unwrap(), "ready\n");
    assert_eq!(root.run("stop", &["box"]).status, 0);
    let ended = life.wait_with_output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    let log = String::from_utf8(ended.stderr).unwrap();
    let said: Vec<String> = log
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap_or_else(|_| panic!("{line}")))
        .map(|line| line["fields"]["message"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(said, ["begins", "ready", "asked to stop", "ended"]);
}

#[test]
fn in_the_background_the_log_is_the_sandboxs() {
    let root = Root::new();
    root.start(&["--log-level", "info"]);
    assert_eq!(root.run("stop", &["box"]).status, 0);
    let log = root.run("logs", &["box", "--monitor"]).text();
    // What came before was said where it was started.
    assert!(!log.contains("begins"), "{log}");
    assert!(
        log.contains("asked to stop") && log.contains("ended"),
        "{log}"
    );
}

#[test]
fn who_cannot_be_told_is_found_before_anything_is_made() {
    let root = Root::new();
    for flags in [["--ready-fd", "987654"], ["--pid-file", "/nowhere/pid"]] {
        let ended = root
            .guest("start", &["box", "--no-agent"])
            .args(flags)
            .run();
        assert_eq!(ended.status, 1, "{}", ended.stderr);
        assert!(ended.stderr.contains(flags[1]), "{}", ended.stderr);
        assert!(!exists(&root.path("r/box")), "{flags:?}");
    }
}

#[test]
fn a_run_that_is_stopped_before_its_workload_began_has_not_gone_well() {
    let root = Root::new();
    let archive = root.empty_archive();
    let vmm = root
        .guest("run", &["--name", "box", "--initramfs"])
        .arg(&archive)
        .args(["--", "true"])
        .start();
    root.await_process();
    let stopped = root.run("stop", &["box"]);
    assert_eq!(stopped.status, 0, "{}", stopped.stderr);
    let ended = vmm.end();
    assert_eq!(ended.status, 143, "{}", ended.stderr);
    assert_eq!(root.run("wait", &["box"]).text(), "143\n");
}

#[test]
fn lc02_a_background_process_that_is_killed_as_it_boots_is_told_of() {
    let root = Root::new();
    let archive = root.empty_archive();
    let vmm = root
        .guest("start", &["box", "-d", "--initramfs"])
        .arg(&archive)
        .start();
    root.await_process();
    assert_eq!(root.run("kill", &["box"]).status, 0);
    let ended = vmm.end();
    assert_ne!(ended.status, 0);
    assert!(!ended.stderr.is_empty(), "it says that it failed");
    assert!(ended.stdout.is_empty());
}

#[test]
fn damaged_files_keep_no_sandbox_from_being_ended_and_removed() {
    let root = Root::new();
    for file in ["config.json", "last.json", "current.json", "counter"] {
        root.start(&[]);
        let pid = i32::try_from(root.ps()["pid"].as_i64().unwrap()).unwrap();
        let process = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
        fs::write(root.path("r/box").join(file), b"\xff{").unwrap();
        let removed = root.run("rm", &["-f", "box"]);
        assert_eq!(removed.status, 0, "{file}: {}", removed.stderr);
        assert!(!exists(&root.path("r/box")), "{file}");
        let mut ended = [PollFd::new(&process, PollFlags::IN)];
        assert_eq!(
            poll(&mut ended, Some(&Timespec::default())),
            Ok(1),
            "{file}"
        );
    }
}

#[test]
fn following_a_log_ends_with_the_sandbox_or_with_its_reader() {
    let root = Root::new();
    root.start(&[]);
    let follower = root.vmm("logs", &["-f", "box"]).start();
    follower.stdout.wait_for("up");
    // A reader that goes while nothing more is written.
    let mut gone = Command::new(Vmm::binary())
        .args(["logs", "-f", "box", "--dir"])
        .arg(root.path("r"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = [0; 2];
    gone.stdout.take().unwrap().read_exact(&mut said).unwrap();
    assert_eq!((&said, gone.wait().unwrap().code()), (b"up", Some(0)));
    assert_eq!(root.run("stop", &["box"]).status, 0);
    let ended = follower.end();
    assert_eq!(ended.status, 0, "{}", ended.stderr);
    assert!(ended.text().starts_with("up"), "{}", ended.text());
}

#[test]
fn lc02_the_name_of_a_killed_monitor_is_free_at_once() {
    let root = Root::new();
    root.start(&[]);
    for _ in 0..20 {
        root.signal(Signal::KILL);
        assert_eq!(root.ps()["state"], "dead");
        root.start(&[]);
    }
    root.signal(Signal::KILL);
    let removed = root.run("rm", &["box"]);
    assert_eq!(removed.status, 0, "{}", removed.stderr);
}
