//! Many at once, and ends that cross on the way.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode};
use vmm_protocol::limits::MAX_WINDOW;
use vmm_protocol::{CancelReason, Cause, ClientMessage, ExecRequest};

use crate::client::{Said, sh};
use crate::harness::{PATIENCE, Sandbox, wait_readable};

const MS: u64 = 1_000_000;

#[test]
fn ex10_cancel_races_natural_exit_ten_thousand_times_and_there_is_one_record_each_time() {
    const LANES: u64 = 4;
    let outcomes = std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..LANES)
            .map(|_| scope.spawn(|| race(10_000 / LANES)))
            .collect();
        lanes
            .into_iter()
            .map(|lane| lane.join().unwrap())
            .fold([0, 0], |sum, lane| [sum[0] + lane[0], sum[1] + lane[1]])
    });
    assert_eq!(outcomes.iter().sum::<u64>(), 10_000);
    assert!(
        outcomes.iter().all(|count| *count > 1_000),
        "no race: {outcomes:?} exited and were cancelled"
    );
}

/// Races of one client with one agent; how many exited and how many were cancelled.
fn race(rounds: u64) -> [u64; 2] {
    const STEP: Duration = Duration::from_micros(20);
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let request = ExecRequest::new(["/bin/true"]);
    let [mut exited, mut cancelled] = [0, 0];
    // From the request to the cancel: longer after each one that won, shorter after each that lost, so that it stays
    // where the two meet.
    let mut delay = Duration::ZERO;
    for round in 0..rounds {
        let id = client.exec(&request);
        let moment = Instant::now() + delay;
        let mut asked = false;
        let record = loop {
            let left = moment.saturating_duration_since(Instant::now());
            if !asked && client.quiet_for(left) {
                client.cancel(id, if round % 3 == 0 { MS } else { 0 });
                asked = true;
            }
            // Of another exec there is nothing to come: its record was the last.
            match client.next().unwrap() {
                (of, Said::Started { .. }) if of == id => {}
                (of, Said::Exit(record)) if of == id => break record,
                (of, said) => panic!("{said:?} of {of} in the round of {id}"),
            }
        };
        match record.cause {
            Cause::Exited(0) => {
                exited += 1;
                delay = delay.saturating_sub(STEP);
            }
            Cause::Cancelled(CancelReason::Request) => {
                cancelled += 1;
                delay += STEP;
            }
            other => panic!("{other:?}"),
        }
        // Too late, and no mistake.
        client.cancel(id, 0);
    }
    let ping = client.ping();
    assert_eq!(client.next(), Some((ping, Said::Pong)));
    [exited, cancelled]
}

/// What of a flood may come before the first byte of another exec: what the socket between them holds and what the
/// agent has queued. How much more time that is belongs to `cargo xtask bench exec`.
const AHEAD: usize = 1 << 20;

#[test]
fn ex12_first_bytes_of_nineteen_wait_for_no_more_of_a_flood_than_was_under_way() {
    const OTHERS: usize = 19;
    let sandbox = Sandbox::new();
    let fifo = sandbox.folder.path().join("said");
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
    // Open for both ways: neither side waits for the other.
    let mut said = File::options().read(true).write(true).open(&fifo).unwrap();
    let mut client = sandbox.connect();
    let mut waiting = BTreeMap::new();
    for number in 0..OTHERS {
        let script = format!("read go; echo {number}; echo >{}", fifo.display());
        let mut other = sh(&script);
        other.stdin = true;
        let id = client.exec(&other);
        client.started(id);
        waiting.insert(id, format!("{number}\n"));
    }
    let mut flood = sh("exec yes");
    flood.output_limit = None;
    // Sixteen times what may be ahead: credit is not what holds it back.
    flood.window = MAX_WINDOW;
    let flood = client.exec(&flood);
    client.started(flood);
    let mut seen = 0;
    while seen < AHEAD {
        seen += output(client.next_of(flood));
    }
    // They write while nobody reads the session; what is under way of the flood then is before them.
    for id in waiting.keys() {
        client.send(*id, &ClientMessage::Stdin(b"\n"));
    }
    wait_readable(&said, PATIENCE);
    said.read_exact(&mut [0; OTHERS]).unwrap();
    let mut ahead = 0;
    let mut first = BTreeMap::new();
    let mut ended = 0;
    while ended < OTHERS {
        let (id, said) = client.next().unwrap();
        match said {
            Said::Output(_, data) if id == flood => {
                ahead += data.len();
                assert!(
                    first.len() == OTHERS || ahead < AHEAD,
                    "{ahead} bytes of the flood, and only {first:?} had a byte"
                );
            }
            Said::Output(_, data) => {
                assert_eq!(data, waiting[&id].as_bytes(), "records are never mixed");
                first.insert(id, ahead);
            }
            Said::Exit(record) => {
                assert_eq!(record.cause, Cause::Exited(0));
                ended += 1;
            }
            _ => {}
        }
    }
    assert_eq!(first.len(), OTHERS);
    client.cancel(flood, 0);
    let flood = client.finish(flood);
    assert_eq!(*flood.cause(), Cause::Cancelled(CancelReason::Request));
}

fn output(said: Option<Said>) -> usize {
    match said {
        Some(Said::Output(_, data)) => data.len(),
        other => panic!("not output but {other:?}"),
    }
}
