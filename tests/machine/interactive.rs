//! `-i` and `-t` in a stock guest: what a command reads, and a shell that one can live in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // All of it is test code.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write, pipe};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use vmm_tests::{Ended, Terminal, Vmm};

/// A sandbox that stays, removed when dropped.
struct Guest(tempfile::TempDir);

impl Guest {
    fn start() -> Self {
        // Below /tmp for its length: a socket's path has 107 bytes.
        let guest = Self(tempfile::tempdir_in("/tmp").unwrap());
        let started = guest
            .vmm("start")
            .args(["-d", "--ready-timeout", "240s"])
            .patience(Duration::from_secs(300))
            .run();
        assert_eq!(started.status, 0, "{}", started.stderr);
        guest
    }

    /// `vmm VERB` of it.
    fn vmm(&self, verb: &str) -> Vmm {
        let root = self.0.path().join("r");
        Vmm::new(verb).args(["box".as_ref(), "--dir".as_ref(), root.as_os_str()])
    }

    fn exec(&self, flags: &[&str], script: &str) -> Vmm {
        self.vmm("exec")
            .args(flags)
            .args(["--", "sh", "-c", script])
    }

    fn run(&self, flags: &[&str], script: &str) -> Ended {
        self.exec(flags, script).run()
    }

    /// A shell on a terminal, which has said that it is there.
    fn shell(&self, terminal: &Terminal) -> vmm_tests::Running {
        let shell = self
            .vmm("exec")
            .env("TERM", "vt220")
            .args(["-it", "--", "sh"])
            .start_on(terminal);
        greet(terminal);
        shell
    }
}

/// Waits until a shell answers: each time another word, since the screen keeps the earlier ones.
fn greet(terminal: &Terminal) {
    static GREETINGS: AtomicU32 = AtomicU32::new(1000);
    let number = GREETINGS.fetch_add(1, Ordering::SeqCst);
    terminal.ask(
        &format!("echo here-$((1+{number}))"),
        &format!("here-{}", number + 1),
    );
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.vmm("rm").arg("-f").run();
    }
}

#[test]
fn st01_st02_st03_stdin_is_passed_on_to_its_end_and_holds_nothing_up() {
    let guest = Guest::start();

    // What it is for.
    let (reader, mut writer) = pipe().unwrap();
    let counting = guest
        .vmm("exec")
        .args(["-i", "--", "wc", "-l"])
        .stdin(reader)
        .start();
    writer.write_all(b"a\nb\n").unwrap();
    drop(writer);
    let ended = counting.end();
    assert_eq!((ended.text().trim(), ended.status), ("2", 0), "{ended:?}");

    // A file from where it stands, nothing, and what is not asked for.
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"skipped\nread\n").unwrap();
    file.seek(SeekFrom::Start(8)).unwrap();
    assert_eq!(
        guest.exec(&["-i"], "cat").stdin(file).run().text(),
        "read\n"
    );
    let null = File::open("/dev/null").unwrap();
    let ended = guest.exec(&["-i"], "cat; echo $?").stdin(null).run();
    assert_eq!(ended.text(), "0\n");
    let (reader, mut writer) = pipe().unwrap();
    writer.write_all(b"for another").unwrap();
    let ended = guest
        .exec(&[], "cat; exit 5")
        .stdin(reader.try_clone().unwrap())
        .run();
    assert_eq!((ended.text().as_str(), ended.status), ("", 5));

    // ST01: a command that never reads, and a pipe that stays open.
    let ended = guest
        .exec(&["-i"], "exit 6")
        .stdin(reader.try_clone().unwrap())
        .run();
    assert_eq!(ended.status, 6, "{}", ended.stderr);
    let ended = guest
        .exec(&["-i", "--timeout", "1s"], "exec sleep 600")
        .stdin(reader)
        .run();
    assert_eq!(ended.status, 124, "{}", ended.stderr);
    drop(writer);

    // ST02: one that closes its stdin is an event, and then whoever writes to ours learns it.
    let (reader, mut writer) = pipe().unwrap();
    let script = "trap 'exit 4' USR1; exec <&-; echo closed; while :; do sleep 0.1; done";
    let closing = guest.exec(&["-i", "--json"], script).stdin(reader).start();
    closing.stdout.wait_for("\"output\"");
    while writer.write_all(&[b'x'; 4096]).is_ok() {}
    closing.stdout.wait_for("stdin_closed");
    closing.signal(Signal::USR1);
    let ended = closing.end();
    assert_eq!(ended.status, 4, "{}", ended.stderr);
    let events: Vec<Value> = ended
        .text()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let closed = events.iter().find(|event| event["event"] == "stdin_closed");
    assert_eq!(closed.unwrap()["why"], "broken_pipe", "{events:?}");
    assert_eq!(events.last().unwrap()["cause"], "exited");

    // ST03: much of it both ways at once, and all of it back after its end.
    let whole: Vec<u8> = (0..3_000_000u32)
        .flat_map(|at| (at.wrapping_mul(2_654_435_761)).to_le_bytes())
        .collect();
    let (reader, mut writer) = pipe().unwrap();
    let cat = guest
        .exec(&["-i", "--output-limit", "none"], "cat; echo over >&2")
        .stdin(reader)
        .patience(Duration::from_secs(200))
        .start();
    let bytes = whole.clone();
    let feeder = std::thread::spawn(move || writer.write_all(&bytes));
    let ended = cat.end();
    feeder.join().unwrap().unwrap();
    assert_eq!((ended.status, ended.stderr.as_str()), (0, "over\n"));
    assert!(ended.stdout == whole, "{} bytes", ended.stdout.len());
}

#[test]
fn st04_a_terminal_without_a_user_and_what_cannot_be_together() {
    let guest = Guest::start();
    let ended = guest.vmm("exec").args(["-t", "--", "tty"]).run();
    assert_eq!(ended.status, 0, "{}", ended.stderr);
    assert!(ended.text().starts_with("/dev/pts/"), "{}", ended.text());
    let script = "stty size; echo err >&2; cat; test -t 0 && test -t 1 && test -t 2; echo $?";
    let ended = guest.run(&["-t"], script);
    assert_eq!(ended.text(), "24 80\r\nerr\r\n0\r\n", "{}", ended.stderr);
    let ended = guest.run(&["-t", "--env", "TERM=mine"], "echo $TERM");
    assert_eq!(ended.text(), "mine\r\n");

    let terminal = Terminal::new(33, 99);
    for (flags, words) in [
        (&["-it"][..], "-t with -i needs a terminal on stdin"),
        (&["-i", "--tty"], "leave -t away"),
    ] {
        let ended = guest.run(flags, "echo never");
        assert_eq!((ended.status, ended.text().as_str()), (125, ""));
        assert!(ended.stderr.contains(words), "{}", ended.stderr);
    }
    let json = guest.exec(&["-it", "--json"], "echo never");
    assert_eq!(json.start_on(&terminal).status(), 125);
    terminal.screen.wait_for("send stdout elsewhere");
    for (flags, words) in [
        (&["-i", "-d"][..], "leave -i away, or -d"),
        (&["-i", "--no-agent"], "takes no input"),
    ] {
        let command: &[&str] = match flags.contains(&"-d") {
            true => &["--", "true"],
            false => &[],
        };
        let ended = Vmm::new("run").args(flags).args(command).run();
        assert_eq!(ended.status, 125);
        assert!(ended.stderr.contains(words), "{}", ended.stderr);
    }
    // Nothing of it touched the terminal.
    assert_eq!(terminal.modes(), Terminal::new(33, 99).modes());
}

#[test]
fn st04_a_shell_on_a_terminal_has_its_size_its_keys_and_its_jobs() {
    let guest = Guest::start();
    let terminal = Terminal::new(33, 99);
    let before = terminal.modes();
    let shell = guest.shell(&terminal);
    assert!(terminal.is_raw());
    terminal.ask("stty size", "33 99");
    terminal.ask("echo \"<$TERM$HOME>\"", "<vt220/root>");
    terminal.ask("tty", "/dev/pts/");
    terminal.resize(40, 120);
    // The size goes another way than the keys: it comes, whenever it does.
    terminal.ask("until stty size | grep 40.120; do :; done", "40 120");
    // Ctrl-C and Ctrl-Z are the guest's, and so are its jobs.
    let sleep = |mark: &str, shown: &str| {
        let line = format!("sh -c 'echo {mark}; exec sleep 600'");
        terminal.ask(&line, shown);
    };
    sleep("first-$((1+1))", "first-2");
    terminal.keys("\x03");
    terminal.ask("echo status-$?", "status-130");
    // This one says when it has the terminal again: `fg` names its job before that. It reads nothing: what is typed
    // behind Ctrl-C is for the shell.
    let job = "trap 'echo again-$((3+4))' CONT; echo second-$((1+1)); while :; do sleep 1; done";
    terminal.ask(
        &format!("sh -c \"{}\"", job.replace('$', "\\$")),
        "second-2",
    );
    terminal.keys("\x1a");
    terminal.screen.wait_for("Stopped");
    terminal.ask("jobs | wc -l; echo told-$((2+3))", "told-5");
    terminal.ask("fg", "again-7");
    terminal.keys("\x03");
    terminal.ask("echo then-$?", "then-130");
    terminal.ask("exec sh -c 'echo last-$((4+5)); cat; exit 9'", "last-9");
    terminal.keys("\x04");
    assert_eq!(shell.status(), 9);
    assert_eq!(terminal.modes(), before);

    // A command that nobody limits: a shell outlives its first megabyte.
    let shell = guest.shell(&terminal);
    terminal.ask(
        "head -c 2000000 /dev/zero | tr '\\0' '\\r'; echo past-$((8*8))",
        "past-64",
    );
    terminal.keys("exit 3\n");
    assert_eq!(shell.status(), 3);
    assert_eq!(terminal.modes(), before);
}

#[test]
fn a_terminal_comes_back_whatever_ends_the_command_or_its_client() {
    let guest = Guest::start();
    let terminal = Terminal::new(24, 80);
    let before = terminal.modes();
    // The shell ignores TERM, and is killed after its grace.
    for (signal, status) in [
        (Signal::TERM, 143),
        (Signal::INT, 130),
        (Signal::QUIT, 131),
        // The shell's own end of it.
        (Signal::HUP, 129),
    ] {
        let shell = guest.shell(&terminal);
        assert!(terminal.is_raw());
        shell.signal(signal);
        assert_eq!(shell.status(), status, "{signal:?}");
        assert_eq!(terminal.modes(), before, "{signal:?}");
    }
    // A second one does not wait.
    let shell = guest.shell(&terminal);
    shell.signal(Signal::QUIT);
    shell.signal(Signal::TERM);
    assert!([131, 143].contains(&shell.status()));
    assert_eq!(terminal.modes(), before);
    // One that is not found.
    let command = guest.vmm("exec").args(["-it", "--", "no-such-program"]);
    assert_eq!(command.start_on(&terminal).status(), 127);
    assert_eq!(terminal.modes(), before);

    // The window is closed: what ran in it goes.
    let window = Terminal::new(24, 80);
    let shell = guest.shell(&window);
    window.ask("sleep 4321 & echo bg-$((6*7))", "bg-42");
    window.hang_up();
    shell.status();
    let ended = guest.run(&[], "ps | grep -c 's[l]eep 4321'");
    assert_eq!(ended.text(), "0\n", "{}", ended.stderr);

    // The sandbox is lost.
    let shell = guest.shell(&terminal);
    assert_eq!(guest.vmm("kill").run().status, 0);
    assert_eq!(shell.status(), 125);
    assert_eq!(terminal.modes(), before);
    terminal.screen.wait_for("the command is lost");
}

#[test]
fn a_client_that_is_stopped_gives_the_terminal_back_and_takes_it_again() {
    let guest = Guest::start();
    let terminal = Terminal::new(30, 90);
    let script = format!(
        "{} exec box --dir {} -it -- sh",
        Vmm::binary().display(),
        guest.0.path().join("r").display()
    );
    let mut shell = Command::new("sh");
    shell.arg("-im").env("PS1", "host-$? ").env_remove("ENV");
    let mut shell = terminal.seat(&shell).spawn().unwrap();
    terminal.screen.wait_for("host-0 ");
    terminal.keys(&format!("{script}\n"));
    greet(&terminal);
    assert!(terminal.is_raw());
    // The client, whose parent is the host's shell.
    let children = format!("/proc/{0}/task/{0}/children", shell.id());
    let client: i32 = std::fs::read_to_string(children)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    let client = rustix::process::Pid::from_raw(client).unwrap();
    rustix::process::kill_process(client, Signal::TSTP).unwrap();
    terminal.ask("echo out-$((5*5))", "out-25");
    terminal.resize(50, 150);
    terminal.keys("fg\n");
    terminal.ask("until stty size | grep 50.150; do :; done", "50 150");
    assert!(terminal.is_raw());
    terminal.keys("exit 8\n");
    terminal.screen.wait_for("host-8 ");
    assert!(!terminal.is_raw());

    // In the background it waits for the foreground before it touches the terminal.
    terminal.keys(&format!("{script} &\n"));
    let jobs = guest.0.path().join("jobs").display().to_string();
    let line = format!("until jobs >{jobs}; grep tty.output {jobs}; do :; done");
    terminal.ask(&line, "(tty output)");
    terminal.keys("fg\n");
    greet(&terminal);
    assert!(terminal.is_raw());
    terminal.keys("exit 7\n");
    terminal.screen.wait_for("host-7 ");
    assert!(!terminal.is_raw());
    terminal.keys("exit\n");
    assert_eq!(shell.wait().unwrap().code(), Some(7));
}

#[test]
fn run_it_is_a_shell_in_a_sandbox_of_its_own() {
    let terminal = Terminal::new(25, 75);
    let before = terminal.modes();
    let shell = Vmm::machine().args(["-it", "--", "sh"]).start_on(&terminal);
    terminal.ask("stty size", "25 75");
    greet(&terminal);
    assert!(terminal.is_raw());
    terminal.resize(26, 76);
    terminal.ask("until stty size | grep 26.76; do :; done", "26 76");
    terminal.keys("exit\n");
    assert_eq!(shell.status(), 0);
    assert_eq!(terminal.modes(), before);

    // A boot can be interrupted by its key: the terminal is not the guest's yet.
    let booting = Vmm::machine()
        .args(["--log-level", "info", "-it", "--", "sh"])
        .start_on(&terminal);
    terminal.screen.wait_for("begins");
    terminal.keys("\x03");
    assert_eq!(booting.status(), 130);
    assert_eq!(terminal.modes(), before);

    let (reader, mut writer) = pipe().unwrap();
    let run = Vmm::machine()
        .args(["-i", "--", "wc", "-c"])
        .stdin(reader)
        .start();
    writer.write_all(&[b'x'; 100_000]).unwrap();
    drop(writer);
    assert_eq!(run.end().text(), "100000\n");
}
