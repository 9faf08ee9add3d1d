//! EX05 over the wire: both machines and the exec between them, with bytes that travel in pieces of
//! any size.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::tests::{drain, end, hello};
use super::*;
use crate::exec::{Exec, Reader, Settings};
use crate::message::{ExecRequest, Policy};
use crate::{CancelReason, Cause, Record, Stream};

#[derive(Debug, Clone)]
enum Step {
    Write {
        id: u64,
        stream: Stream,
        count: usize,
    },
    ToClient {
        most: usize,
    },
    ToAgent {
        most: usize,
    },
    Consume {
        id: u64,
        stream: Stream,
        count: u64,
    },
    Cancel {
        id: u64,
    },
    End {
        id: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let stream = || prop_oneof![Just(Stream::Stdout), Just(Stream::Stderr)];
    let id = || 1..=2_u64;
    let size = || prop_oneof![1..40_usize, 1..3000_usize, Just(200_000_usize)];
    prop_oneof![
        4 => (id(), stream(), size()).prop_map(|(id, stream, count)| Step::Write { id, stream, count }),
        4 => size().prop_map(|most| Step::ToClient { most }),
        3 => size().prop_map(|most| Step::ToAgent { most }),
        3 => (id(), stream(), 1..50_000_u64).prop_map(|(id, stream, count)| Step::Consume { id, stream, count }),
        1 => id().prop_map(|id| Step::Cancel { id }),
        1 => id().prop_map(|id| Step::End { id }),
    ]
}

struct World {
    client: ClientSession,
    agent: AgentSession,
    execs: BTreeMap<u64, Exec>,
    written: BTreeMap<(u64, usize), Vec<u8>>,
    received: BTreeMap<(u64, usize), Vec<u8>>,
    records: BTreeMap<u64, Vec<Record>>,
    limits: BTreeMap<u64, [u64; 2]>,
    wire: Vec<u8>,
}

impl World {
    fn new(requests: &[ExecRequest]) -> Self {
        let mut client = ClientSession::new(hello(), 0);
        for request in requests {
            assert!(client.exec(request).is_ok());
        }
        Self {
            client,
            agent: AgentSession::new(hello(), 0),
            execs: BTreeMap::new(),
            written: BTreeMap::new(),
            received: BTreeMap::new(),
            records: BTreeMap::new(),
            limits: BTreeMap::new(),
            wire: Vec::new(),
        }
    }

    fn write(&mut self, id: u64, stream: Stream, count: usize) {
        let Some(exec) = self
            .execs
            .get_mut(&id)
            .filter(|exec| exec.record().is_none())
        else {
            return;
        };
        let written = self.written.entry((id, stream.index())).or_default();
        let mut bytes = vec![written.len() as u8; count];
        for (at, byte) in bytes.iter_mut().step_by(61).enumerate() {
            *byte = at as u8;
        }
        let taken = exec.absorb(stream, &bytes, 0);
        written.extend_from_slice(&bytes[..taken]);
    }

    fn agent_hears(&mut self, most: usize) {
        let bytes = self.client.outgoing();
        let space = self.agent.space();
        let count = bytes.len().min(space.len()).min(most);
        space[..count].copy_from_slice(&bytes[..count]);
        self.client.wrote(count);
        self.agent.filled(count, 0);
        let (agent, execs) = (&mut self.agent, &mut self.execs);
        while let Some(request) = agent
            .next()
            .unwrap_or_else(|error| unreachable!("{}", error.describe()))
        {
            match request {
                Request::Exec { id, request } => {
                    let mut exec = Exec::new(Settings::new(&request), 0);
                    exec.started(id, 1);
                    execs.insert(id, exec);
                }
                Request::Consumed { id, bytes } => {
                    if let Some(exec) = execs.get_mut(&id) {
                        exec.acknowledge(Reader::FIRST, bytes);
                    }
                }
                Request::Cancel {
                    id,
                    reason,
                    grace_ns,
                } => {
                    if let Some(exec) = execs.get_mut(&id) {
                        exec.cancel(reason, grace_ns, 0);
                    }
                }
                _ => {}
            }
        }
    }

    fn client_hears(&mut self, most: usize) {
        self.wire.extend(drain(&mut self.agent, &self.execs, most));
        for id in self.agent.finished() {
            self.execs.remove(&id);
        }
        while !self.wire.is_empty() {
            let space = self.client.space();
            let count = space.len().min(self.wire.len());
            space[..count].copy_from_slice(&self.wire[..count]);
            self.client.filled(count, 0);
            self.wire.drain(..count);
            self.hear();
        }
    }

    fn hear(&mut self) {
        while let Some(event) = self
            .client
            .next()
            .unwrap_or_else(|error| unreachable!("{}", error.describe()))
        {
            match event {
                Event::Output {
                    id, stream, data, ..
                } => {
                    assert!(!self.records.contains_key(&id), "nothing after the record");
                    self.received
                        .entry((id, stream.index()))
                        .or_default()
                        .extend_from_slice(data);
                }
                Event::Limit { id, at } => {
                    assert!(self.limits.insert(id, at).is_none(), "told once")
                }
                Event::Exit { id, record } => self.records.entry(id).or_default().push(*record),
                _ => {}
            }
        }
    }

    fn consume(&mut self, id: u64, stream: Stream, count: u64) {
        self.client.consumed(id, stream, count);
    }
}

proptest! {
    #![proptest_config(crate::cases(150))]

    #[test]
    fn ex05_client_receives_gapless_prefixes_and_one_record(
        limit in prop_oneof![Just(None), (1..5000_u64).prop_map(Some), Just(Some(150_000_u64))],
        drains in any::<bool>(),
        window in prop_oneof![1..5000_u64, Just(1_u64 << 20)],
        steps in proptest::collection::vec(step(), 0..80),
    ) {
        let mut request = ExecRequest::new(["test"]);
        request.output_limit = limit;
        request.policy = if drains { Policy::Drain } else { Policy::Kill };
        request.window = window;
        let mut world = World::new(&[request.clone(), request]);
        for step in steps {
            match step {
                // A byte a round is slow: so many of them, and no more, show what it does.
                Step::Write { id, stream, count } if window < 64 => {
                    world.write(id, stream, count.min(500));
                }
                Step::Write { id, stream, count } => world.write(id, stream, count),
                Step::ToClient { most } => world.client_hears(most),
                Step::ToAgent { most } => world.agent_hears(most),
                Step::Consume { id, stream, count } => world.consume(id, stream, count),
                Step::Cancel { id } => drop(world.client.cancel(id, CancelReason::Request, 0)),
                Step::End { id } => { world.execs.get_mut(&id).map(end); }
            }
        }

        // Then everything flows, and all of it comes.
        for _ in 0..100_000 {
            world.agent_hears(usize::MAX);
            world.execs.values_mut().for_each(end);
            world.client_hears(usize::MAX);
            for id in 1..=2 {
                world.consume(id, Stream::Stdout, u64::MAX);
                world.consume(id, Stream::Stderr, u64::MAX);
            }
            if world.client.live().count() == 0 {
                break;
            }
        }
        prop_assert_eq!(world.client.live().count(), 0, "both end");
        prop_assert!(world.execs.is_empty(), "nothing is kept");
        for id in 1..=2 {
            let records = &world.records[&id];
            prop_assert_eq!(records.len(), 1);
            let empty = Vec::new();
            for index in 0..2 {
                let received = world.received.get(&(id, index)).unwrap_or(&empty);
                let written = world.written.get(&(id, index)).unwrap_or(&empty);
                prop_assert_eq!(received.as_slice(), &written[..received.len()], "a prefix");
                prop_assert_eq!(received.len() as u64, records[0].streams[index].forwarded);
                if !records[0].limited {
                    prop_assert_eq!(received.len(), written.len(), "nothing is missing");
                }
            }
            if records[0].limited {
                let sum: u64 = records[0].streams.iter().map(|counts| counts.forwarded).sum();
                prop_assert_eq!(Some(sum), limit);
                prop_assert!(world.limits.contains_key(&id));
            }
            prop_assert!(!matches!(records[0].cause, Cause::Lost(_)));
        }
    }
}
