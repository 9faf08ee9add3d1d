//! EX05: whatever happens in whatever order, what is forwarded is a prefix, and there is one
//! record.

use proptest::prelude::*;

use super::rig::{BOTH, Rig};
use super::*;

#[derive(Debug, Clone)]
enum Step {
    Write {
        stream: usize,
        count: usize,
    },
    Read {
        stream: usize,
        most: usize,
    },
    CloseWriter {
        stream: usize,
    },
    Consume {
        reader: usize,
        stdout: u64,
        stderr: u64,
    },
    Attach {
        back: u64,
    },
    Detach {
        reader: usize,
    },
    LoseClient,
    Cancel {
        grace: u64,
        lost: bool,
    },
    Pass {
        time: u64,
    },
    Exit {
        code: u8,
    },
    LeafEmpty,
    Oom {
        main: bool,
    },
    Act,
}

fn step() -> impl Strategy<Value = Step> {
    let size = prop_oneof![
        1..20_usize,
        1..5000_usize,
        Just(70_000_usize),
        Just(400_000_usize)
    ];
    prop_oneof![
        4 => (0..2_usize, size.clone()).prop_map(|(stream, count)| Step::Write { stream, count }),
        4 => (0..2_usize, size).prop_map(|(stream, most)| Step::Read { stream, most }),
        1 => (0..2_usize).prop_map(|stream| Step::CloseWriter { stream }),
        2 => (0..4_usize, 0..500_000_u64, 0..500_000_u64)
            .prop_map(|(reader, stdout, stderr)| Step::Consume { reader, stdout, stderr }),
        1 => prop_oneof![Just(0_u64), 0..3_000_000_u64].prop_map(|back| Step::Attach { back }),
        1 => (0..4_usize).prop_map(|reader| Step::Detach { reader }),
        1 => Just(Step::LoseClient),
        1 => (0..3_u64, any::<bool>()).prop_map(|(grace, lost)| Step::Cancel { grace: grace * 1000, lost }),
        1 => prop_oneof![1..5000_u64, Just(600_000_000_u64)].prop_map(|time| Step::Pass { time }),
        1 => any::<u8>().prop_map(|code| Step::Exit { code }),
        1 => Just(Step::LeafEmpty),
        1 => any::<bool>().prop_map(|main| Step::Oom { main }),
        3 => Just(Step::Act),
    ]
}

struct Watch {
    limited_at: Option<[u64; 2]>,
    lengths: [u64; 2],
    /// Who attached, and how far each has come.
    readers: Vec<(Reader, [u64; 2])>,
}

impl Watch {
    fn check(&mut self, rig: &Rig, limit: Option<u64>) {
        let lengths = BOTH.map(|stream| rig.exec.length(stream));
        for stream in BOTH {
            let index = stream.index();
            assert!(
                lengths[index] >= self.lengths[index],
                "a stream never shrinks"
            );
            let earliest = rig.exec.earliest(stream) as usize;
            let bytes = rig.forwarded(stream);
            assert_eq!(
                bytes,
                rig.written[index][earliest..earliest + bytes.len()],
                "{stream} is a prefix"
            );
            assert_eq!(earliest + bytes.len(), lengths[index] as usize);
        }
        for (_, position) in &self.readers {
            for stream in BOTH {
                assert!(
                    rig.exec.earliest(stream) <= position[stream.index()],
                    "nothing that a reader has to come leaves the store"
                );
            }
        }
        if let Some(limit) = limit {
            assert!(lengths[0] + lengths[1] <= limit);
        }
        if rig
            .exec
            .notices()
            .iter()
            .any(|notice| notice.what == NoticeKind::Limit)
        {
            assert_eq!(
                Some(lengths[0] + lengths[1]),
                limit,
                "limited means exactly the cap"
            );
            assert_eq!(
                *self.limited_at.get_or_insert(lengths),
                lengths,
                "nothing after the limit"
            );
        }
        self.lengths = lengths;
    }
}

fn apply(rig: &mut Rig, watch: &mut Watch, step: &Step) {
    match *step {
        Step::Write { stream, count } => {
            let salt = rig.written[stream].len() as u8;
            let mut bytes = vec![salt; count];
            for (at, byte) in bytes.iter_mut().step_by(61).enumerate() {
                *byte = at as u8;
            }
            rig.write(BOTH[stream], &bytes);
        }
        Step::Read { stream, most } => rig.read(BOTH[stream], most),
        Step::CloseWriter { stream } => rig.held[stream] = false,
        Step::Consume {
            reader,
            stdout,
            stderr,
        } => {
            let at = reader % (watch.readers.len() + 1);
            let (reader, position) = match watch.readers.get_mut(at) {
                Some((reader, position)) => (*reader, Some(position)),
                None => (Reader::FIRST, None),
            };
            let lengths = BOTH.map(|stream| rig.exec.length(stream));
            rig.exec.acknowledge(reader, [stdout, stderr]);
            if let Some(position) = position {
                position[0] = lengths[0].min(position[0] + stdout);
                position[1] = lengths[1].min(position[1] + stderr);
            }
        }
        Step::Attach { back } => {
            let from = BOTH.map(|stream| rig.exec.length(stream).saturating_sub(back));
            let earliest = BOTH.map(|stream| rig.exec.earliest(stream));
            match rig.exec.attach(from) {
                Ok(reader) => watch.readers.push((reader, from)),
                Err(AttachError::BelowStart {
                    earliest: named,
                    possible,
                }) => {
                    assert_eq!(named, earliest);
                    assert!(from[0] < earliest[0] || from[1] < earliest[1]);
                    assert!(possible[0] >= earliest[0] && possible[1] >= earliest[1]);
                }
                Err(error) => panic!("{error}"),
            }
        }
        Step::Detach { reader } => {
            if !watch.readers.is_empty() {
                let at = reader % watch.readers.len();
                let (reader, _) = watch.readers.swap_remove(at);
                rig.exec.detach(reader);
            }
        }
        Step::LoseClient => drop(rig.exec.detach(Reader::FIRST).then_some(())),
        Step::Cancel { grace, lost } => {
            let reason = if lost {
                CancelReason::ClientLost
            } else {
                CancelReason::Request
            };
            rig.exec.cancel(reason, grace, rig.now);
        }
        Step::Pass { time } => rig.tick(rig.now + time),
        Step::Exit { code } => rig.exec.main_exited(MainEnd::Exited(code), rig.now),
        Step::LeafEmpty => {
            // A leaf is only ever empty once its main process is gone.
            if rig.exec.end.is_some() {
                rig.exec.leaf_empty();
            }
        }
        Step::Oom { main } => {
            let oom = Oom {
                scope: crate::OomScope::Exec,
                pid: 1,
                victim: "x".into(),
                limit: 1,
                peak: 1,
            };
            rig.exec.oom(oom, main);
        }
        Step::Act => rig.act(),
    }
}

proptest! {
    #![proptest_config(crate::cases(150))]

    #[test]
    fn ex05_streams_are_prefixes_and_the_record_is_one(
        limit in prop_oneof![Just(None), (1..2000_u64).prop_map(Some), Just(Some(300_000_u64)), Just(Some(1 << 20))],
        drain in any::<bool>(),
        timeout in prop_oneof![Just(0_u64), 1..20_000_u64],
        unkillable in any::<bool>(),
        detached in any::<bool>(),
        steps in proptest::collection::vec(step(), 0..60),
    ) {
        let mut request = crate::ExecRequest::new(["test"]);
        request.output_limit = limit;
        request.policy = if drain { Policy::Drain } else { Policy::Kill };
        request.timeout_ns = timeout;
        request.detached = detached;
        let mut rig = Rig::new(Settings::new(&request));
        rig.unkillable = unkillable;
        let mut watch = Watch { limited_at: None, lengths: [0; 2], readers: Vec::new() };
        for step in &steps {
            apply(&mut rig, &mut watch, step);
            watch.check(&rig, limit);
        }

        // Then everything comes to its end by itself: cancel, and the clock runs.
        rig.exec.cancel(CancelReason::Request, 0, rig.now);
        rig.turn();
        for _ in 0..4 {
            rig.tick(rig.now + 3_000_000_000);
            rig.turn();
            watch.check(&rig, limit);
        }
        let record = rig.exec.record().cloned();
        prop_assert!(record.is_some(), "the exec ends");
        let record = record.unwrap_or_else(|| unreachable!());
        prop_assert_eq!(rig.actions.iter().filter(|action| **action == Action::Finish).count(), 1);
        prop_assert_eq!(rig.exec.deadline(), None);
        for stream in BOTH {
            let counts = record.streams[stream.index()];
            prop_assert_eq!(counts.forwarded, rig.exec.length(stream));
            prop_assert_eq!(counts.seen, counts.forwarded + counts.dropped);
            prop_assert!(counts.seen <= rig.written[stream.index()].len() as u64);
        }
        prop_assert_eq!(record.limited, watch.limited_at.is_some());
        if record.cause == Cause::OutputLimit {
            prop_assert!(record.limited && !drain);
        }

        // And nothing that comes later changes it.
        rig.exec.main_exited(MainEnd::Exited(1), rig.now);
        rig.exec.cancel(CancelReason::Interrupt, 0, rig.now);
        rig.exec.finish(Usage { cpu_ns: 7, ..Usage::default() }, rig.now);
        rig.tick(rig.now + 10_000_000_000);
        prop_assert_eq!(rig.exec.record(), Some(&record));
    }
}
