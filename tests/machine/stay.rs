//! Sandboxes that stay: reached by many, looked at, killed, started again, removed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // All of it is test code.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use vmm_tests::{Ended, Monitor, Vmm, checkout};

/// A state root of the test's own, whose sandboxes go with it.
struct Root(tempfile::TempDir);

impl Root {
    fn new() -> Self {
        // Below /tmp for its length: a socket's path has 107 bytes.
        Self(tempfile::tempdir_in("/tmp").unwrap())
    }

    fn dir(&self) -> String {
        let root = self.0.path().join("r");
        root.display().to_string()
    }

    fn vmm(&self, verb: &str) -> Vmm {
        Vmm::new(verb)
            .args(["--dir", &self.dir()])
            .patience(Duration::from_secs(300))
    }

    fn run(&self, verb: &str, arguments: &[&str]) -> Ended {
        self.vmm(verb).args(arguments).run()
    }

    fn start(&self, name: &str, flags: &[&str]) {
        let ended = self
            .vmm("start")
            .args([name, "-d", "--ready-timeout", "240s"])
            .args(flags)
            .run();
        assert_eq!(ended.status, 0, "{}", ended.stderr);
        assert_eq!(ended.text(), format!("{name}\n"));
    }

    fn ps(&self, name: &str) -> Value {
        let ended = self.run("ps", &["--json", name]);
        assert_eq!(ended.status, 0, "{}", ended.stderr);
        serde_json::from_str(&ended.text()).unwrap()
    }

    fn pid(&self, name: &str) -> Pid {
        let pid = self.ps(name)["pid"].as_i64().unwrap();
        Pid::from_raw(i32::try_from(pid).unwrap()).unwrap()
    }

    fn entries(&self, name: &str) -> Vec<String> {
        let entries = fs::read_dir(Path::new(&self.dir()).join(name)).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        for entry in fs::read_dir(self.dir()).into_iter().flatten().flatten() {
            let name = entry.file_name().into_string().unwrap();
            self.run("rm", &["-f", &name]);
        }
    }
}

#[test]
fn twenty_at_once_reach_one_sandbox_and_all_of_it_can_be_seen_and_ended() {
    let root = Root::new();
    root.start("box", &[]);
    let running: Vec<_> = (0..20)
        .map(|number| {
            let script = format!("echo out{number}; echo err{number} >&2; exit {number}");
            root.vmm("exec")
                .args(["box", "--", "sh", "-c", &script])
                .start()
        })
        .collect();
    for (number, exec) in running.into_iter().enumerate() {
        let ended = exec.end();
        assert_eq!(
            ended.status,
            i32::try_from(number).unwrap(),
            "{}",
            ended.stderr
        );
        assert_eq!(ended.text(), format!("out{number}\n"));
        assert_eq!(ended.stderr, format!("err{number}\n"));
    }
    let row = root.ps("box");
    assert_eq!(row["state"], "ready");
    let inspected = root.run("inspect", &["box", "--json"]).text();
    let nonce = fs::read_to_string(Path::new(&root.dir()).join("box/current.json")).unwrap();
    let nonce: Value = serde_json::from_str(&nonce).unwrap();
    assert!(!inspected.contains(nonce["nonce"].as_str().unwrap()));
    // The agent's own is left, once those of the last verbs are gone.
    let monitor = Monitor::of(&serde_json::from_str(&inspected).unwrap());
    monitor.metrics_with(|metrics| metrics["vsock"]["connections"] == 1);
    let metrics: Value =
        serde_json::from_str(&root.run("metrics", &["box", "--json"]).text()).unwrap();
    assert_eq!(metrics["devices"]["without_progress"], 0, "{metrics}");
    let agent = &metrics["agent"];
    assert_eq!(agent["without_progress"], 0, "{metrics}");
    assert_eq!(
        (&agent["sessions"], &agent["execs"]),
        (&0.into(), &0.into())
    );
    assert!(agent["wakeups"].as_u64() > Some(20), "{metrics}");
    assert!(root.run("logs", &["box"]).text().contains("[    0."));
    assert_eq!(root.run("rm", &["box"]).status, 4, "it runs");

    let waiting = root.vmm("wait").args(["box"]).start();
    assert_eq!(root.run("stop", &["box"]).status, 0);
    assert_eq!(waiting.end().text(), "0\n");
    assert_eq!(root.ps("box")["state"], "ended");
    assert!(
        root.run("ps", &[]).text().lines().count() == 1,
        "ended ones are shown with -a"
    );
    assert!(
        root.run("logs", &["box"]).text().contains("[    0."),
        "after the end, too"
    );
    let kept = [
        "config.json",
        "console.log",
        "counter",
        "last.json",
        "lock",
        "monitor.log",
    ];
    assert_eq!(root.entries("box"), kept);
    assert_eq!(root.run("exec", &["box", "--", "true"]).status, 125);
    assert_eq!(root.run("rm", &["box"]).status, 0);
    assert_eq!(root.run("inspect", &["box"]).status, 3);
}

#[test]
fn ev02_neither_monitor_nor_vcpu_of_an_idle_sandbox_does_anything_for_ten_seconds() {
    let root = Root::new();
    root.start("box", &[]);
    let ended = root.run("exec", &["box", "--", "true"]);
    assert_eq!(ended.status, 0, "{}", ended.stderr);
    let inspected = root.run("inspect", &["box", "--json"]).text();
    let monitor = Monitor::of(&serde_json::from_str(&inspected).unwrap());
    // The agent's own is left.
    monitor.metrics_with(|metrics| metrics["vsock"]["connections"] == 1);
    monitor.assert_idle(Duration::from_secs(10));
}

#[test]
fn ge08_a_second_start_is_refused_and_the_first_life_is_undisturbed() {
    let root = Root::new();
    root.start("box", &[]);
    let row = root.ps("box");
    let second = root.run("start", &["box"]);
    assert_eq!(second.status, 4);
    for part in [
        row["pid"].to_string(),
        row["generation"].as_str().unwrap().to_owned(),
    ] {
        assert!(second.stderr.contains(&part), "{part}: {}", second.stderr);
    }
    assert_eq!(root.ps("box"), row);
    assert_eq!(root.run("exec", &["box", "--", "true"]).status, 0);
}

#[test]
fn lc02_a_killed_monitor_leaves_a_dead_sandbox_whose_name_is_free_at_once() {
    let root = Root::new();
    root.start("box", &[]);
    let first = root.ps("box");
    let pid = root.pid("box");
    kill_process(pid, Signal::KILL).unwrap();
    let waited = root.run("wait", &["box"]);
    assert_eq!(waited.status, 4, "no record is made up: {}", waited.stderr);
    assert_eq!(root.ps("box")["state"], "dead");
    assert_eq!(root.run("exec", &["box", "--", "true"]).status, 125);
    root.start("box", &[]);
    let second = root.ps("box");
    let counter = |row: &Value| {
        row["generation"]
            .as_str()
            .unwrap()
            .split('-')
            .next()
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    assert_eq!(counter(&second), counter(&first) + 1);
    assert_eq!(
        root.entries("box")
            .iter()
            .filter(|name| name.starts_with('g'))
            .count(),
        1
    );
    assert_eq!(root.run("exec", &["box", "--", "true"]).status, 0);
    assert_eq!(root.run("rm", &["-f", "box"]).status, 0);
    assert!(!Path::new(&root.dir()).join("box").exists());
}

#[test]
fn lc02_a_sandbox_outlives_its_launcher_unless_it_is_tied_to_it() {
    let root = Root::new();
    for (name, flag, state) in [
        ("free", "", "ready"),
        ("tied", "--die-with-parent", "ended"),
    ] {
        // The shell is the launcher; it ends with this script.
        let script = format!(
            "{} start --dir {} {name} -d --ready-timeout 240s {flag}; echo $?",
            Vmm::binary().display(),
            root.dir()
        );
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(
            text,
            format!("{name}\n0\n"),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        if state == "ended" {
            assert_eq!(root.run("wait", &[name]).status, 0);
        }
        assert_eq!(root.ps(name)["state"], state, "{name}");
    }
}

#[test]
fn ge13_a_monitor_killed_in_mid_stream_is_told_at_once_with_the_last_offsets() {
    let root = Root::new();
    root.start("box", &[]);
    let script = "printf 12345; sleep 1000";
    let exec = root
        .vmm("exec")
        .args(["box", "--", "sh", "-c", script])
        .start();
    exec.stdout.wait_for("12345");
    kill_process(root.pid("box"), Signal::KILL).unwrap();
    let ended = exec.end();
    assert_eq!(ended.status, 125);
    assert!(
        ended
            .stderr
            .contains("after 5 bytes of stdout and 0 of stderr"),
        "{}",
        ended.stderr
    );
}

#[test]
fn signals_of_an_exec_are_its_commands_and_term_or_a_stop_cancels_it() {
    let root = Root::new();
    root.start("box", &[]);
    let script = "trap 'echo hup' HUP; trap 'echo usr1' USR1; trap 'echo usr2; exit 7' USR2; \
                  echo up; sleep 1000 & while :; do wait; done";
    let exec = |script: &str| {
        let exec = root
            .vmm("exec")
            .args(["box", "--", "sh", "-c", script])
            .start();
        exec.stdout.wait_for("up\n");
        exec
    };
    let signalled = exec(script);
    for (signal, text) in [
        (Signal::HUP, "hup\n"),
        (Signal::USR1, "usr1\n"),
        (Signal::USR2, "usr2\n"),
    ] {
        signalled.signal(signal);
        signalled.stdout.wait_for(text);
    }
    assert_eq!(signalled.end().status, 7);

    let cancelled = exec("trap 'echo term; exit 0' TERM; echo up; sleep 1000 & wait");
    cancelled.signal(Signal::TERM);
    let ended = cancelled.end();
    assert_eq!(
        (ended.status, ended.text().as_str()),
        (143, "up\nterm\n"),
        "{}",
        ended.stderr
    );

    // So does the guest's own end: its workloads have most of the stop's time.
    let stopped = exec("trap 'sleep 1; echo stopped; exit 0' TERM; echo up; sleep 1000 & wait");
    let ended = root.run("stop", &["box", "--time", "120s"]);
    assert_eq!(ended.status, 0, "{}", ended.stderr);
    let ended = stopped.end();
    assert_eq!(
        (ended.status, ended.text().as_str()),
        (143, "up\nstopped\n"),
        "{}",
        ended.stderr
    );
    assert_eq!(root.run("wait", &["box"]).text(), "0\n");

    // One that will not end is killed within the stop's time, and the guest still goes in order.
    root.start("box", &["--stop-time", "20s"]);
    let stubborn = exec("trap '' TERM; echo up; while :; do sleep 1000; done");
    kill_process(root.pid("box"), Signal::TERM).unwrap();
    let ended = stubborn.end();
    assert_eq!(ended.status, 143, "{}", ended.stderr);
    let record = root.run("wait", &["box", "--json"]).text();
    let record: Value = serde_json::from_str(&record).unwrap();
    assert_eq!(
        (&record["end"], &record["status"]),
        (&"stopped".into(), &0.into()),
        "{record}"
    );
}

#[test]
fn a_named_run_keeps_its_record_and_its_output_until_it_is_removed() {
    let root = Root::new();
    let status = root.0.path().join("status.json");
    let ended = root
        .vmm("run")
        .args([
            "--name",
            "job",
            "-d",
            "--ready-timeout",
            "240s",
            "--status-file",
        ])
        .arg(&status)
        .args(["--", "sh", "-c", "echo hello; exit 5"])
        .run();
    assert_eq!(
        (ended.status, ended.text().as_str()),
        (0, "job\n"),
        "{}",
        ended.stderr
    );
    assert_eq!(root.run("wait", &["job"]).text(), "5\n");
    assert_eq!(root.run("logs", &["-f", "job"]).text(), "hello\n");
    let exit: Value = serde_json::from_str(&fs::read_to_string(&status).unwrap()).unwrap();
    assert_eq!(
        (&exit["cause"], &exit["status"]),
        (&"exited".into(), &5.into()),
        "{exit}"
    );
    let again = root.run("run", &["--name", "job", "--", "true"]);
    assert_eq!(again.status, 125);
    assert!(again.stderr.contains("vmm rm job"), "{}", again.stderr);
    assert_eq!(root.run("rm", &["job"]).status, 0);
}

#[test]
fn client_of_the_documentation_runs_a_command_and_shows_what_a_stale_client_is_told() {
    let root = Root::new();
    root.start("box", &[]);
    let client = checkout("docs/examples/client.py");
    let output = Command::new("python3")
        .arg(client)
        .arg(Path::new(&root.dir()).join("box"))
        .args(["sh", "-c", "echo out; echo err >&2; exit 3"])
        .output()
        .expect("start python3, which this test needs: apt-get install python3");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{errors}");
    assert_eq!(output.stdout, b"out\n");
    assert!(errors.starts_with("err\n"), "{errors}");
    assert!(errors.contains("ERR STALE"), "{errors}");
}

/// A tenth of the case's 10,000: the nest forks a hundred times slower than a host.
const ORPHANS: u32 = 1_000;

#[test]
fn pr02_orphans_are_collected_by_init_and_statuses_stay_with_their_execs() {
    let root = Root::new();
    root.start("box", &[]);
    let orphans = format!(
        "i=0; while [ $i -lt {ORPHANS} ]; do ( (exit 3) & ); i=$((i+1)); done; echo $i; exit 7"
    );
    let flood = root
        .vmm("exec")
        .args(["box", "--", "sh", "-c", &orphans])
        .start();
    for status in [0, 1, 5, 42] {
        let script = format!("exit {status}");
        let ended = root.run("exec", &["box", "--", "sh", "-c", &script]);
        assert_eq!(ended.status, status, "{}", ended.stderr);
    }
    let flood = flood.end();
    assert_eq!(
        (flood.status, flood.text()),
        (7, format!("{ORPHANS}\n")),
        "{}",
        flood.stderr
    );
    let zombies = "grep -l 'State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l";
    assert_eq!(
        root.run("exec", &["box", "--", "sh", "-c", zombies])
            .text()
            .trim(),
        "0"
    );
}
