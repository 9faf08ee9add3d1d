//! What a workload finds when it starts, and what is said when it does not.

use std::os::unix::fs::PermissionsExt;

use vmm_protocol::{Cause, ClientMessage, ExecRequest, RefusedCode, StartStage, User, Winsize};

use crate::client::{Said, sh};
use crate::harness::{GENERATION, Sandbox};

const ENOENT: i32 = 2;
const EACCES: i32 = 13;
const ENOTDIR: i32 = 20;

/// A user that may not search folders of others; the tests may themselves run as root.
fn ordinary(request: &mut ExecRequest) {
    if rustix::process::getuid().is_root() {
        request.user = Some(User {
            uid: 65_534,
            gid: 65_534,
            groups: Vec::new(),
        });
    }
}

#[test]
fn ex16_a_request_out_of_range_is_refused_with_its_value_and_nothing_runs() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    type Change = fn(&mut ExecRequest);
    let changes: [(Change, &str); 7] = [
        (
            |request| request.timeout_ns = u64::MAX,
            "18446744073709551615",
        ),
        (|request| request.output_limit = Some(0), " 0 "),
        (
            |request| request.output_limit = Some(u64::MAX),
            "18446744073709551615",
        ),
        (|request| request.window = 0, " 0 "),
        (|request| request.window = u64::MAX, "18446744073709551615"),
        (|request| request.argv.clear(), "program"),
        (|request| request.env = vec![b"=x".to_vec()], "\"=x\""),
    ];
    let mark = sandbox.folder.path().join("mark");
    for (change, named) in changes {
        let mut request = ExecRequest::new([
            b"touch".to_vec(),
            mark.clone().into_os_string().into_encoded_bytes(),
        ]);
        change(&mut request);
        let outcome = client.run(&request);
        let Some(Said::Refused(RefusedCode::Invalid, message)) = outcome.said.last() else {
            panic!("{outcome:?}")
        };
        assert!(message.contains(named), "{message}");
        assert!(!mark.exists());
    }
    assert_eq!(
        *client.run(&sh("exit 0")).cause(),
        Cause::Exited(0),
        "the session lives"
    );
}

#[test]
fn ex17_a_bad_working_directory_is_named_with_errno_and_stage_with_and_without_terminal() {
    let sandbox = Sandbox::new();
    let folder = sandbox.folder.path();
    let make = |name: &str, mode: u32| {
        std::fs::create_dir(folder.join(name)).unwrap();
        std::fs::set_permissions(folder.join(name), PermissionsExt::from_mode(mode)).unwrap();
    };
    std::fs::set_permissions(folder, PermissionsExt::from_mode(0o755)).unwrap();
    make("open", 0o755);
    make("closed", 0o000);
    std::fs::write(folder.join("file"), "").unwrap();
    let mut client = sandbox.connect();
    for terminal in [
        None,
        Some(Winsize {
            rows: 24,
            columns: 80,
        }),
    ] {
        for (name, errno) in [("missing", ENOENT), ("file", ENOTDIR), ("closed", EACCES)] {
            let mut request = sh("echo never");
            ordinary(&mut request);
            request.tty = terminal;
            request.cwd = folder.join(name).into_os_string().into_encoded_bytes();
            let outcome = client.run(&request);
            let stage = StartStage::Directory;
            assert_eq!(
                *outcome.cause(),
                Cause::StartFailed { stage, errno },
                "{name}"
            );
            assert_eq!(outcome.record().status(), 126);
            assert!(outcome.stdout.is_empty());
            assert_eq!(
                outcome.said.len(),
                1,
                "no start was told: {:?}",
                outcome.said
            );
        }
        let mut request = sh("pwd");
        ordinary(&mut request);
        request.tty = terminal;
        request.cwd = folder.join("open").into_os_string().into_encoded_bytes();
        let outcome = client.run(&request);
        assert_eq!(outcome.text().trim(), folder.join("open").to_str().unwrap());
    }
}

#[test]
fn ex17_a_program_that_cannot_run_is_told_apart_from_one_that_is_not_there() {
    let sandbox = Sandbox::new();
    let folder = sandbox.folder.path();
    std::fs::write(folder.join("plain"), "#!/bin/sh\n").unwrap();
    std::fs::write(folder.join("garbage"), "\u{1}\u{2}").unwrap();
    std::fs::set_permissions(folder.join("garbage"), PermissionsExt::from_mode(0o755)).unwrap();
    let mut client = sandbox.connect();
    let path = |name: &str| folder.join(name).into_os_string().into_encoded_bytes();
    const ENOEXEC: i32 = 8;
    for (program, errno, status) in [
        (b"no-such-program".to_vec(), ENOENT, 127),
        (path("missing"), ENOENT, 127),
        (path("plain"), EACCES, 126),
        (path("garbage"), ENOEXEC, 126),
    ] {
        let outcome = client.run(&ExecRequest::new([program]));
        let stage = StartStage::Execute;
        assert_eq!(*outcome.cause(), Cause::StartFailed { stage, errno });
        assert_eq!(outcome.record().status(), status);
        assert!(outcome.record().leaf_empty);
    }
}

#[test]
fn ex17_a_user_that_cannot_be_taken_on_is_named() {
    if rustix::process::getuid().is_root() {
        let sandbox = Sandbox::new();
        let mut request = sh("id -u; id -g; id -G");
        request.user = Some(User {
            uid: 1234,
            gid: 2345,
            groups: vec![2345, 77],
        });
        assert_eq!(
            sandbox.connect().run(&request).text(),
            "1234\n2345\n2345 77\n"
        );
        return;
    }
    let sandbox = Sandbox::new();
    let mut request = sh("echo never");
    request.user = Some(User {
        uid: 0,
        gid: 0,
        groups: Vec::new(),
    });
    let stage = StartStage::User;
    assert_eq!(
        *sandbox.connect().run(&request).cause(),
        Cause::StartFailed { stage, errno: 1 }
    );
}

#[test]
fn ex18_the_environment_is_exact_and_nothing_leaks_from_the_agents_own() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let mut request = ExecRequest::new(["env", "-0"]);
    let lines = |stdout: &[u8]| -> Vec<Vec<u8>> {
        stdout
            .split(|byte| *byte == 0)
            .filter(|line| !line.is_empty())
            .map(<[u8]>::to_vec)
            .collect()
    };
    let ours = [
        format!("PATH={}", vmm_agent::command::PATH),
        "HOME=/root".to_owned(),
        format!("VMM_GENERATION={GENERATION}"),
        "VMM_RESTORE_COUNT=2".to_owned(),
    ]
    .map(String::into_bytes);
    assert_eq!(lines(&client.run(&request).stdout), ours);
    request.env = vec![
        b"A=1".to_vec(),
        b"A=2".to_vec(),
        b"B=x=y".to_vec(),
        b"C=line\nline".to_vec(),
        b"D=\xff\xfe".to_vec(),
        "E=\u{20ac}".as_bytes().to_vec(),
        b"F=".to_vec(),
    ];
    let mut expected = ours.to_vec();
    expected.extend(request.env[1..].iter().cloned());
    assert_eq!(lines(&client.run(&request).stdout), expected);
    request.env.clear();
    assert_eq!(
        lines(&client.run(&request).stdout),
        ours,
        "nothing of the last one is left"
    );
}

#[test]
fn ex18_a_workload_has_three_descriptors_default_signals_and_a_session_of_its_own() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let outcome = client.run(&sh("ls /proc/self/fd | tr '\\n' ' '"));
    // 3 is ls looking at the folder.
    assert_eq!(outcome.text(), "0 1 2 3 ");
    let outcome = client.run(&ExecRequest::new(["grep", "^Sig[BI]", "/proc/self/status"]));
    for line in outcome.text().lines() {
        assert!(line.ends_with("\t0000000000000000"), "{line}");
    }
    let outcome = client.run(&sh("ps -o sid= -p $$ | tr -d ' '; echo $$"));
    let text = outcome.text();
    let mut lines = text.lines();
    assert_eq!(lines.next(), lines.next(), "{text}");
}

#[test]
fn ex19_cancel_right_behind_the_request_is_accepted() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    for _ in 0..50 {
        let id = client.exec(&sh("exec sleep 600"));
        client.cancel(id, 0);
        let outcome = client.finish(id);
        assert!(
            matches!(outcome.cause(), Cause::Cancelled(_)),
            "{:?}",
            outcome.cause()
        );
        // And after its end it is no mistake either: the two may cross on the way.
        client.send(id, &ClientMessage::StdinClose);
        client.cancel(id, 0);
    }
    client.round_trip();
}
