//! docs/operate.md by the letter: its unit under a real systemd, its Kubernetes command as the first process of a
//! namespace. Both need root, which the nest has.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // All of it is test code.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use vmm_tests::{Cgroup, Vmm, checkout, image};

/// Longer than a guest takes to boot where processors are emulated.
const PATIENCE: Duration = Duration::from_secs(300);

/// In place of /usr, with bin/vmm and share/vmm: a folder that no unit hides.
const USR: &str = "/run/usr";

/// The first fenced block of a language in docs/operate.md, with [`USR`] in place of /usr.
fn example(language: &str) -> String {
    let text = fs::read_to_string(checkout("docs/operate.md")).unwrap();
    let (_, rest) = text.split_once(&format!("```{language}\n")).unwrap();
    let (block, _) = rest.split_once("\n```").unwrap();
    let block = block.replace("/usr/bin/vmm", &format!("{USR}/bin/vmm"));
    block.replace("/usr/share/vmm", &format!("{USR}/share/vmm")) + "\n"
}

/// A program as the first process of namespaces of its own; all of it ends when this is dropped. The host may be
/// somebody's: its processes, mounts, name, queues and control groups are not within reach.
struct Namespace {
    unshare: Child,
    _usr: tempfile::TempDir,
    _cgroup: Cgroup,
}

/// Joins a control group, then enters a namespace with that as its root: not before the fork, since a group with a
/// process in it that is not within reach could not be divided.
const ENTER: &str = "echo 0 >\"$1/cgroup.procs\"; shift; exec unshare --cgroup \"$@\"";

impl Namespace {
    /// Runs a script there, with a /run of its own.
    fn new(script: &str, notify: Option<&Path>) -> Self {
        assert!(
            rustix::process::geteuid().is_root(),
            "this test makes namespaces and needs root: run it in the nest (cargo xtask test --kvm nest) or with sudo"
        );
        let folder = tempfile::tempdir_in("/tmp").unwrap();
        let usr = folder.path();
        fs::create_dir_all(usr.join("bin")).unwrap();
        fs::copy(Vmm::binary(), usr.join("bin/vmm")).unwrap();
        let share = usr.join("share/vmm");
        fs::create_dir_all(&share).unwrap();
        fs::copy(image::elf(), share.join("vmlinux")).unwrap();
        fs::copy(image::initramfs(), share.join("initramfs.cpio")).unwrap();
        let script = format!(
            "umount -l /sys/fs/cgroup; mount -t cgroup2 cgroup2 /sys/fs/cgroup; mount -t tmpfs tmpfs /run
             mkdir {USR}; mv \"$1\"/* {USR}/; {script}"
        );
        let cgroup = Cgroup::new();
        let mut unshare = Command::new("unshare");
        unshare
            .args([
                "--fork",
                "--pid",
                "--mount",
                "--mount-proc",
                "--uts",
                "--ipc",
                "--kill-child",
            ])
            .args(["sh", "-ec", ENTER, "sh"])
            .arg(cgroup.path())
            .args(["sh", "-ec", &script, "sh"])
            .arg(usr)
            .env("container", "vmm-tests")
            .stdin(Stdio::null());
        if let Some(path) = notify {
            unshare.env("NOTIFY_SOCKET", path);
        }
        let unshare = unshare
            .spawn()
            .expect("start unshare, which this test needs: apt-get install util-linux");
        Self {
            unshare,
            _usr: folder,
            _cgroup: cgroup,
        }
    }

    /// The first process, by its number outside.
    fn first(&self) -> String {
        let id = self.unshare.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
        children.split_whitespace().next().unwrap().to_owned()
    }

    /// Runs a command inside.
    fn run(&self, words: &[&str]) -> Output {
        let output = Command::new("nsenter")
            .args(["--target", &self.first(), "--mount", "--pid", "--cgroup"])
            .args(words)
            .stdin(Stdio::null())
            .output();
        output.expect("start nsenter, which this test needs: apt-get install util-linux")
    }

    /// Runs a command inside that has to go well; what it wrote.
    fn good(&self, words: &[&str]) -> String {
        let output = self.run(words);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "{words:?}: {}, {errors}",
            output.status
        );
        String::from_utf8(output.stdout).unwrap()
    }

    fn vmm(&self, verb: &str, arguments: &[&str]) -> String {
        let vmm = format!("{USR}/bin/vmm");
        let mut words = vec![&*vmm, verb, "--dir", "/run/vmm"];
        words.extend(arguments);
        self.good(&words)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // Its child goes with it, and with that all of the namespace.
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
    }
}

/// A socket that a supervised program says its state on.
struct Notices(UnixDatagram, PathBuf);

impl Notices {
    fn bind(folder: &Path) -> Self {
        let path = folder.join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(socket, path)
    }

    /// Waits until it says so.
    fn await_line(&self, line: &str) {
        let mut buffer = [0; 4096];
        loop {
            let count = self.0.recv(&mut buffer).expect(line);
            let text = String::from_utf8_lossy(&buffer[..count]);
            if text.lines().any(|said| said == line) {
                return;
            }
        }
    }
}

#[test]
fn unit_of_the_documentation_is_verified_starts_is_ready_with_its_agent_and_stops_cleanly() {
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let notices = Notices::bind(folder.path());
    // None of the host's own units: what they do at a boot, such as emptying /tmp, they would do to the host.
    let script = "
        export SYSTEMD_UNIT_PATH=/run/systemd/system SYSTEMD_GENERATOR_PATH=/run/none
        mkdir -p /run/systemd/system
        for target in none sysinit basic local-fs shutdown; do
            printf '[Unit]\\nDescription=Nothing\\nDefaultDependencies=no\\n' >/run/systemd/system/$target.target
        done
        command -v /lib/systemd/systemd >/dev/null || { echo 'systemd is missing: apt-get install systemd' >&2; exit 1; }
        exec /lib/systemd/systemd --system --unit=none.target --show-status=no --log-target=console --log-level=warning
    ";
    let systemd = Namespace::new(script, Some(&notices.1));
    notices.await_line("READY=1");
    let untouched = folder.path().join("untouched");
    fs::write(&untouched, "").unwrap();
    let unit = example("ini");
    let unit_file = folder.path().join("vmm@.service");
    fs::write(&unit_file, unit).unwrap();
    let unit_file = unit_file.to_str().unwrap();
    let said = systemd.run(&["systemd-analyze", "verify", unit_file]);
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(!said.contains("vmm@"), "{said}");
    systemd.good(&["cp", unit_file, "/run/systemd/system/vmm@.service"]);
    systemd.good(&["systemctl", "daemon-reload"]);

    // Returns when the agent is ready: then a command runs at once.
    let started = systemd.run(&["systemctl", "start", "vmm@box"]);
    let status = systemd.run(&["systemctl", "status", "--no-pager", "--full", "vmm@box"]);
    let status = String::from_utf8_lossy(&status.stdout);
    assert!(started.status.success(), "{status}");
    assert_eq!(systemd.vmm("exec", &["box", "--", "echo", "hi"]), "hi\n");
    let ready: Value = serde_json::from_str(&systemd.vmm("ps", &["--json", "box"])).unwrap();
    let pid = systemd.good(&["systemctl", "show", "--value", "-p", "MainPID", "vmm@box"]);
    assert_eq!(ready["state"], "ready", "{ready}");
    assert_eq!(ready["pid"].to_string(), pid.trim());

    systemd.good(&["systemctl", "stop", "vmm@box"]);
    // A status other than 0, a signal or a timeout would have left it "failed".
    let ended = systemd.good(&[
        "systemctl",
        "show",
        "--value",
        "-p",
        "ActiveState",
        "vmm@box",
    ]);
    assert_eq!(ended.trim(), "inactive");
    assert!(untouched.exists(), "the host's files are its own");
    assert_eq!(systemd.vmm("wait", &["box"]), "0\n");
}

#[test]
fn command_of_the_documentation_is_the_first_process_of_a_container_and_stops_on_term() {
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let notices = Notices::bind(folder.path());
    let text = example("yaml");
    let command = text
        .lines()
        .find_map(|line| line.trim().strip_prefix("command: ["))
        .and_then(|words| words.strip_suffix(']'))
        .unwrap();
    let words: Vec<&str> = command
        .split(", ")
        .filter_map(|word| word.strip_prefix('"')?.strip_suffix('"'))
        .collect();
    let script = format!(
        "mkdir -m 777 /run/vmm; export VMM_IMAGE={USR}/share/vmm; exec {}",
        words.join(" ")
    );
    let mut container = Namespace::new(&script, Some(&notices.1));
    notices.await_line("READY=1");
    let probe = |line: &str| line.trim().starts_with("command: [") && line.contains("exec");
    assert!(text.lines().any(probe), "the probe is an exec: {text}");
    let vmm = format!("{USR}/bin/vmm");
    container.good(&[&vmm, "exec", "box", "--dir", "/run/vmm/root", "--", "true"]);
    let first = container.first().parse().unwrap();
    let first = rustix::process::Pid::from_raw(first).unwrap();
    rustix::process::kill_process(first, rustix::process::Signal::TERM).unwrap();
    notices.await_line("STOPPING=1");
    assert!(container.unshare.wait().unwrap().success());
}
