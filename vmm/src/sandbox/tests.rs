use super::*;
use std::fs;
use std::os::unix::fs::MetadataExt;

struct Root(tempfile::TempDir);

impl Root {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn sandbox(&self, name: &str) -> Sandbox {
        Sandbox::new(&self.0.path().join("root"), name.parse().unwrap())
    }
}

fn record() -> Record {
    Record {
        end: End::Stopped,
        reason: "asked to".to_owned(),
        status: 0,
        exit: None,
    }
}

#[test]
fn a_life_says_how_far_it_is_and_leaves_its_record() {
    let root = Root::new();
    let sandbox = root.sandbox("box");
    assert!(!sandbox.exists());
    assert!(matches!(
        sandbox.clone().existing(),
        Err(Error::Missing { .. })
    ));
    let mut life = sandbox.claim().unwrap().begin(Keep::Records).unwrap();
    assert_eq!(sandbox.view().unwrap().state, State::Alive(Phase::Starting));
    let current = || Current::read(&sandbox.file("current.json")).unwrap();
    assert!(current().unwrap().folder.is_none());
    life.say(Phase::Ready).unwrap();
    let current = current().unwrap();
    assert_eq!(current.generation, life.id());
    assert_eq!(current.nonce, life.generation().nonce().bytes());
    assert_eq!(current.folder.unwrap().join("vsock.sock"), life.vsock());
    for path in [sandbox.folder(), life.vsock().parent().unwrap().to_owned()] {
        assert_eq!(fs::metadata(path).unwrap().mode() & 0o777, 0o700);
    }
    for file in ["lock", "current.json"] {
        let mode = fs::metadata(sandbox.file(file)).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }
    let sockets = life.vsock().parent().unwrap().to_owned();
    life.conclude(&record()).unwrap();
    drop(life);
    assert!(!sockets.exists() && !sandbox.file("current.json").exists());
    // This process, which held the lock, lives: the record says more than that.
    let last = sandbox.view().unwrap().last.unwrap();
    assert_eq!(
        (last["end"].as_str(), last["status"].as_u64()),
        (Some("stopped"), Some(0))
    );
}

#[test]
fn ge08_a_second_start_is_refused_and_names_the_holder_and_its_generation() {
    let root = Root::new();
    let sandbox = root.sandbox("box");
    let life = sandbox.claim().unwrap().begin(Keep::Records).unwrap();
    let before = fs::read(sandbox.file("current.json")).unwrap();
    let error = sandbox.claim().unwrap_err().to_string();
    for part in [
        "box".to_owned(),
        format!("process {}", std::process::id()),
        life.id().to_string(),
        "starting".to_owned(),
    ] {
        assert!(error.contains(&part), "{part}: {error}");
    }
    let nonce = life.generation().nonce().hex();
    assert!(!error.contains(&nonce));
    assert_eq!(fs::read(sandbox.file("current.json")).unwrap(), before);
    drop(life);
    assert!(sandbox.claim().is_ok());
}

#[test]
fn what_a_killed_life_left_is_swept_by_the_next_and_the_counter_goes_on() {
    let root = Root::new();
    let sandbox = root.sandbox("box");
    let life = sandbox.claim().unwrap().begin(Keep::Records).unwrap();
    let old = (life.id(), life.vsock());
    fs::write(&old.1, "").unwrap();
    // A killed process runs no destructor; its lock goes with its descriptors.
    let lock = sandbox.file("lock");
    let said = fs::read(&lock).unwrap();
    drop(life);
    fs::create_dir(old.1.parent().unwrap()).unwrap();
    fs::write(&old.1, "").unwrap();
    fs::write(&lock, said).unwrap();
    for log in ["output.log", "output.log.1", "monitor.log"] {
        fs::write(sandbox.file(log), "of the life before").unwrap();
    }
    let life = sandbox.claim().unwrap().begin(Keep::Records).unwrap();
    assert!(!old.1.parent().unwrap().exists());
    for log in ["output.log", "output.log.1", "monitor.log"] {
        assert!(!sandbox.file(log).exists(), "{log}");
    }
    assert_eq!(life.id().counter, old.0.counter + 1);
    assert_ne!(life.id().public_id, old.0.public_id);
}

#[test]
fn lc02_a_holder_that_is_gone_shows_as_dead_even_if_its_number_is_used_again() {
    let root = Root::new();
    let sandbox = root.sandbox("box");
    drop(sandbox.claim().unwrap().begin(Keep::Records).unwrap());
    let lock = sandbox.file("lock");
    let mut value: serde_json::Value = serde_json::from_slice(&fs::read(&lock).unwrap()).unwrap();
    assert!(sandbox.view().unwrap().state.is_alive());
    let start = value["start_time"].as_u64().unwrap();
    value["start_time"] = (start - 1).into();
    fs::write(&lock, value.to_string()).unwrap();
    assert_eq!(sandbox.view().unwrap().state, State::Dead);
}

#[test]
fn a_run_without_a_name_leaves_nothing_and_is_swept_if_it_was_killed() {
    let root = Root::new();
    let sandbox = root.sandbox("run-1");
    drop(sandbox.claim().unwrap().begin(Keep::Nothing).unwrap());
    assert!(!sandbox.folder().exists());
    let kept = root.sandbox("box");
    drop(kept.claim().unwrap().begin(Keep::Records).unwrap());
    let running = root.sandbox("run-2");
    let life = running.claim().unwrap().begin(Keep::Nothing).unwrap();
    root::make(&sandbox.folder(), false).unwrap();
    fs::write(sandbox.file("unnamed"), "").unwrap();
    fs::write(sandbox.file("lock"), "").unwrap();
    sweep_unnamed(&root.0.path().join("root"));
    assert!(!sandbox.folder().exists() && kept.exists() && running.exists());
    drop(life);
}

#[test]
fn path_too_long_for_a_socket_is_refused_before_anything_is_made() {
    let root = Root::new();
    let deep = root.0.path().join("x".repeat(60));
    let sandbox = Sandbox::new(&deep, "y".repeat(30).parse().unwrap());
    assert!(matches!(
        sandbox.claim(),
        Err(Error::Root(root::Error::TooLong { .. }))
    ));
    assert!(!deep.exists());
}

#[test]
fn listing_knows_sandboxes_from_other_things() {
    let root = Root::new();
    let folder = root.0.path().join("root");
    assert_eq!(Sandbox::list(&folder).unwrap(), []);
    for name in ["b", "a"] {
        root.sandbox(name)
            .claim()
            .unwrap()
            .begin(Keep::Records)
            .unwrap();
    }
    fs::write(folder.join("file"), "").unwrap();
    fs::create_dir(folder.join("empty")).unwrap();
    let names: Vec<String> = Sandbox::list(&folder)
        .unwrap()
        .iter()
        .map(|sandbox| sandbox.name().to_string())
        .collect();
    assert_eq!(names, ["a", "b"]);
}

#[test]
fn damaged_files_are_named_with_the_remedy() {
    let root = Root::new();
    let sandbox = root.sandbox("box");
    drop(sandbox.claim().unwrap().begin(Keep::Records).unwrap());
    for text in [
        "{",
        "[]",
        "{\"pid\": 1}",
        "{\"pid\": -1, \"start_time\": 1}",
    ] {
        fs::write(sandbox.file("lock"), text).unwrap();
        let error = sandbox.view().unwrap_err().to_string();
        assert!(
            error.contains("lock") && error.contains("vmm rm -f"),
            "{error}"
        );
    }
    fs::write(sandbox.file("lock"), "").unwrap();
    assert_eq!(sandbox.view().unwrap().state, State::Dead);
}

#[test]
fn ge08_a_holder_that_has_not_said_who_it_is_is_not_taken_for_the_one_before() {
    let root = Root::new();
    let sandbox = root.sandbox("box");
    drop(sandbox.claim().unwrap().begin(Keep::Records).unwrap());
    let lock = sandbox.file("lock");
    let said = fs::read_to_string(&lock).unwrap();
    let own = Process::own().unwrap();
    let ended = format!("\"start_time\":{}", own.start_time - 1);
    let said = said.replace(&format!("\"start_time\":{}", own.start_time), &ended);
    fs::write(&lock, said).unwrap();
    let claim = sandbox.claim().unwrap();
    let error = sandbox.claim().unwrap_err().to_string();
    assert!(
        error.contains("another process") && !error.contains("generation"),
        "{error}"
    );
    drop(claim);
}

#[test]
fn a_claim_holds_what_it_claimed_however_others_claim_and_remove() {
    let root = Root::new();
    let sandbox = root.sandbox("box");
    let holders = std::sync::atomic::AtomicU32::new(0);
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| {
                use std::sync::atomic::Ordering::SeqCst;
                for round in 0..2_000 {
                    match sandbox.claim() {
                        Ok(claim) => {
                            assert_eq!(holders.fetch_add(1, SeqCst), 0, "claimed twice");
                            assert!(sandbox.exists(), "the lock file of a claim is gone");
                            holders.fetch_sub(1, SeqCst);
                            if round % 4 != 0 {
                                claim.remove().unwrap();
                            }
                        }
                        Err(Error::Busy { .. }) => {}
                        Err(error) => panic!("{error:?}"),
                    }
                }
            });
        }
    });
    sandbox.remove().unwrap();
    assert_eq!(fs::read_dir(&sandbox.root).unwrap().count(), 0);
}

#[test]
fn sweeps_at_once_and_removals_that_were_killed_leave_nothing() {
    let root = Root::new();
    let folder = root.0.path().join("root");
    for round in 0..200 {
        let dead = root.sandbox("run-1");
        dead.claim().unwrap();
        fs::write(dead.file("unnamed"), "").unwrap();
        fs::create_dir_all(folder.join(format!(".removed-{round}-run-2/g1-00000000"))).unwrap();
        std::thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| sweep_unnamed(&folder));
            }
        });
        let left: Vec<_> = fs::read_dir(&folder).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn a_sandbox_can_be_removed_whatever_its_files_hold() {
    let root = Root::new();
    for file in [
        "lock",
        "counter",
        "config.json",
        "last.json",
        "current.json",
    ] {
        let sandbox = root.sandbox("box");
        drop(sandbox.claim().unwrap().begin(Keep::Records).unwrap());
        fs::write(sandbox.file(file), b"\xff{").unwrap();
        sandbox.remove().unwrap();
        assert!(!sandbox.folder().exists(), "{file}");
    }
    let sandbox = root.sandbox("box");
    let life = sandbox.claim().unwrap().begin(Keep::Records).unwrap();
    assert!(matches!(sandbox.remove(), Err(Error::Busy { .. })));
    drop(life);
}

#[test]
fn what_a_long_command_makes_of_the_configuration_is_read_back() {
    let root = Root::new();
    let sandbox = root.sandbox("box");
    drop(sandbox.claim().unwrap().begin(Keep::Records).unwrap());
    // The largest request, of bytes that JSON escapes.
    let value = serde_json::json!({"command": ["\u{1}".repeat(256 << 10)]});
    write_json(&sandbox.file("config.json"), &value).unwrap();
    assert_eq!(sandbox.view().unwrap().config, Some(value));
    fs::write(sandbox.file("config.json"), b"\xff").unwrap();
    assert!(matches!(sandbox.view(), Err(Error::Damaged { .. })));
}

#[test]
fn a_first_life_that_cannot_begin_leaves_nothing_and_a_later_one_leaves_all() {
    let root = Root::new();
    let sandbox = root.sandbox("box");
    for (first, keeps) in [(true, false), (false, true)] {
        if !first {
            drop(sandbox.claim().unwrap().begin(Keep::Records).unwrap());
        }
        let claim = sandbox.claim().unwrap();
        // Where the state is to be replaced by a rename.
        fs::create_dir(sandbox.file("current.new")).unwrap();
        assert!(claim.begin(Keep::Records).is_err());
        assert_eq!(sandbox.exists(), keeps);
    }
}
