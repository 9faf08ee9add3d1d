//! Execs that go on without their clients: started, found, attached to, waited for, ended and forgotten by their numbers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // All of it is test code.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use vmm_tests::{Ended, Vmm, patience};

/// One sandbox that runs; gone when this is dropped.
struct Sandbox(tempfile::TempDir);

impl Sandbox {
    fn start() -> Self {
        // Below /tmp for its length: a socket's path has 107 bytes.
        let sandbox = Self(tempfile::tempdir_in("/tmp").unwrap());
        let started = sandbox
            .vmm("start")
            .args(["-d", "--ready-timeout", "240s"])
            .run();
        assert_eq!(started.status, 0, "{}", started.stderr);
        sandbox
    }

    fn vmm(&self, verb: &str) -> Vmm {
        let root = self.0.path().join("r");
        Vmm::new(verb)
            .args(["box".as_ref(), "--dir".as_ref(), root.as_os_str()])
            .patience(Duration::from_secs(300))
    }

    fn run(&self, verb: &str, arguments: &[&str]) -> Ended {
        self.vmm(verb).args(arguments).run()
    }

    /// Runs it, and wants it to succeed.
    fn good(&self, verb: &str, arguments: &[&str]) -> String {
        let ended = self.run(verb, arguments);
        assert_eq!(ended.status, 0, "{verb} {arguments:?}: {}", ended.stderr);
        ended.text()
    }

    /// `vmm exec --detach`, which prints a number and nothing else.
    fn detach(&self, flags: &[&str], script: &str) -> String {
        let arguments = [&["--detach"], flags, &["--", "sh", "-c", script]].concat();
        let printed = self.good("exec", &arguments);
        let number: u64 = printed.strip_suffix('\n').unwrap().parse().unwrap();
        number.to_string()
    }

    fn execs(&self) -> Vec<Value> {
        let row: Value = serde_json::from_str(&self.good("ps", &["--json"])).unwrap();
        row["execs"].as_array().unwrap().clone()
    }

    fn exec(&self, number: &str) -> Option<Value> {
        let number: u64 = number.parse().unwrap();
        self.execs().into_iter().find(|exec| exec["exec"] == number)
    }

    /// Looks again and again until it is so; each look is a round trip through the guest.
    fn until(&self, number: &str, is: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + patience();
        loop {
            let exec = self.exec(number).unwrap();
            if is(&exec) {
                return exec;
            }
            assert!(Instant::now() < end, "it stays at {exec}");
        }
    }

    fn inspect(&self) -> Value {
        serde_json::from_str(&self.good("inspect", &["--json"])).unwrap()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.run("rm", &["-f"]);
    }
}

#[test]
fn ex14_ex15_ex19_detached_execs_outlive_their_clients_and_are_found_by_their_numbers() {
    let sandbox = Sandbox::start();

    // What is there is had from any offset, byte exact, as often as it is wanted, and the status is the exec's own.
    let expected: String = (1..=100_000).map(|number| format!("{number}\n")).collect();
    let seq = sandbox.detach(&[], "seq 100000; echo error >&2; exit 7");
    let whole = sandbox.run("attach", &[&seq]);
    assert!(
        whole.stdout == expected.as_bytes(),
        "{} bytes",
        whole.stdout.len()
    );
    assert_eq!((whole.stderr.as_str(), whole.status), ("error\n", 7));
    let rest = sandbox.run("attach", &[&seq, "--from", "5000,3"]);
    assert!(rest.stdout == expected.as_bytes()[5000..]);
    assert_eq!((rest.stderr.as_str(), rest.status), ("or\n", 7));
    let beyond = sandbox.run("attach", &[&seq, "--from", "588896,0"]);
    assert_eq!((beyond.status, beyond.stdout.len()), (125, 0));
    assert!(beyond.stderr.contains("588895"), "{}", beyond.stderr);
    let json = sandbox.run("attach", &[&seq, "--json", "--from", "588895,0"]);
    let lines: Vec<Value> = json
        .text()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(
        (&lines[0]["event"], &lines[0]["schema"]),
        (&"started".into(), &1.into())
    );
    assert_eq!(lines.last().unwrap()["code"], 7);
    assert_eq!(sandbox.good("wait", &[&seq]), "7\n");
    let waited: Value = serde_json::from_str(&sandbox.good("wait", &[&seq, "--json"])).unwrap();
    assert_eq!(
        (&waited["cause"], &waited["counts"]["stdout"]["seen"]),
        (&"exited".into(), &588_895.into())
    );
    assert_eq!(sandbox.exec(&seq).unwrap()["state"], "ended");

    // Clients that are lost on the way leave the exec as it is, and the next goes on where they were.
    let script = "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done; read x </tmp/pipe; echo end";
    let script = format!("mkfifo /tmp/pipe; {script}");
    let lines = sandbox.detach(&[], &script);
    let expected: String = (0..2000).map(|number| format!("line {number}\n")).collect();
    let mut received = String::new();
    for _ in 0..3 {
        let from = format!("{},0", received.len());
        let client = sandbox
            .vmm("attach")
            .args([&lines, "--from", &from])
            .start();
        client.stdout.wait_for("line");
        client.signal(Signal::KILL);
        let ended = client.end();
        received += &ended.text();
        assert!(
            expected.starts_with(&received),
            "{from}: no gap and no duplicate"
        );
    }
    assert_eq!(sandbox.exec(&lines).unwrap()["state"], "running");
    sandbox.good("exec", &["--", "sh", "-c", "echo go >/tmp/pipe"]);
    let from = format!("{},0", received.len());
    let last = sandbox.run("attach", &[&lines, "--from", &from]);
    assert_eq!(received + &last.text(), expected + "end\n");

    // Nobody reads: it waits, and its timeout or a cancel ends it all the same.
    let flood = "while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done";
    let waiting = sandbox.detach(&["--output-limit", "none"], flood);
    let timed = sandbox.detach(&["--output-limit", "none", "--timeout", "1s"], flood);
    let found = sandbox.until(&waiting, |exec| exec["state"] == "waiting");
    assert_eq!(found["stdout"]["length"], 1 << 20, "a ring's worth");
    assert_eq!(sandbox.good("wait", &[&timed]), "124\n");
    sandbox.good("cancel", &[&waiting, "--time", "0"]);
    sandbox.good("cancel", &[&waiting]);
    assert_eq!(sandbox.good("wait", &[&waiting]), "137\n");
    assert_eq!(sandbox.run("attach", &[&waiting]).status, 137);

    // Signals, and what is refused in which way.
    let sleeper = sandbox.detach(
        &[],
        "trap 'echo usr1; exit 3' USR1; echo ready; while :; do sleep 1; done",
    );
    sandbox.until(&sleeper, |exec| exec["stdout"]["length"] == 6);
    assert_eq!(sandbox.run("release", &[&sleeper]).status, 4, "it runs");
    let attached = sandbox.vmm("attach").arg(&sleeper).start();
    attached.stdout.wait_for("ready");
    sandbox.good("kill", &[&sleeper, "-s", "usr1"]);
    let ended = attached.end();
    assert_eq!((ended.status, ended.text().as_str()), (3, "ready\nusr1\n"));
    assert_eq!(sandbox.run("kill", &[&sleeper]).status, 4, "it has ended");
    for verb in ["release", "kill", "cancel", "wait"] {
        assert_eq!(sandbox.run(verb, &["99"]).status, 3, "{verb}");
    }
    assert_eq!(sandbox.run("attach", &["99"]).status, 125);
    let failed = sandbox.run("exec", &["--detach", "--", "no-such-program"]);
    assert_eq!(
        (failed.status, failed.stdout.len()),
        (127, 0),
        "{}",
        failed.stderr
    );

    // Until they are released, and no longer.
    for number in [&seq, &lines, &waiting, &timed, &sleeper] {
        sandbox.good("release", &[number]);
        assert_eq!(sandbox.run("release", &[number]).status, 3);
        // It is over, which is all that a cancel wants.
        sandbox.good("cancel", &[number]);
    }
    assert_eq!(sandbox.execs(), Vec::<Value>::new());

    // A budget for all that is kept, of a quarter of the guest's memory: the refusal names what holds it.
    let mut held = Vec::new();
    let refused = loop {
        let arguments = [
            "--detach",
            "--output-limit",
            "16M",
            "--",
            "sh",
            "-c",
            "head -c 16777216 /dev/zero",
        ];
        let ended = sandbox.run("exec", &arguments);
        if ended.status != 0 {
            break ended;
        }
        held.push(ended.text().trim().to_owned());
        assert!(held.len() < 10, "no end of it");
        sandbox.good("wait", &[held.last().unwrap()]);
    };
    assert_eq!(refused.status, 125, "{}", refused.stderr);
    assert!(
        refused
            .stderr
            .contains(&format!("not released: {}", held.join(", "))),
        "{}",
        refused.stderr
    );
    sandbox.good("release", &[&held[0]]);
    let again = sandbox.detach(&["--output-limit", "16M"], "echo again");
    assert_eq!(sandbox.run("attach", &[&again]).text(), "again\n");
}

#[test]
fn inspect_tells_idle_busy_stalled_and_dead_apart_with_the_age_of_the_last_progress() {
    let sandbox = Sandbox::start();
    let idle = sandbox.inspect();
    assert_eq!(idle["activity"]["state"], "idle", "{idle}");
    assert!(idle["activity"]["answer_ms"].is_u64());

    let number = sandbox.detach(&[], "echo working; exec sleep 1000");
    sandbox.until(&number, |exec| exec["stdout"]["length"] == 8);
    let busy = sandbox.inspect();
    assert_eq!(busy["activity"]["state"], "busy", "{busy}");
    let before = busy["activity"]["progress_ms"].as_u64().unwrap();
    let later = sandbox.inspect()["activity"]["progress_ms"]
        .as_u64()
        .unwrap();
    assert!(later >= before, "nothing has moved since");
    assert_eq!(
        busy["execs"][0]["command"],
        "sh -c echo working; exec sleep 1000"
    );
    let listed = sandbox.good("ps", &[]);
    assert!(
        listed.contains("EXEC") && listed.contains("sh -c echo working"),
        "{listed}"
    );

    // Its process is there and says nothing.
    let pid = Pid::from_raw(i32::try_from(busy["pid"].as_i64().unwrap()).unwrap()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    let stalled = sandbox.inspect();
    assert_eq!(
        (&stalled["activity"]["state"], &stalled["state"]),
        (&"stalled".into(), &"ready".into())
    );
    assert!(stalled["execs"].is_null());
    kill_process(pid, Signal::CONT).unwrap();
    assert_eq!(sandbox.inspect()["activity"]["state"], "busy");

    kill_process(pid, Signal::KILL).unwrap();
    let end = Instant::now() + patience();
    while sandbox.inspect()["state"] != "dead" {
        assert!(Instant::now() < end, "it was killed");
    }
    assert_eq!(sandbox.inspect()["activity"]["state"], "dead");
    assert_eq!(sandbox.run("attach", &[&number]).status, 125);
    assert_eq!(sandbox.run("release", &[&number]).status, 4);
}
