//! Many at once, and ends that cross on the way.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use vmm_protocol::{CancelReason, Cause, ExecRequest};

use crate::client::{Client, Said, sh};
use crate::harness::{Sandbox, alone};

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

/// Starts `count` at once; the time to the first byte of each.
fn first_bytes(client: &mut Client, count: usize) -> Vec<Duration> {
    let began = Instant::now();
    let mut waiting = BTreeMap::new();
    for number in 0..count {
        let id = client.exec(&sh(&format!("echo {number}; exit 0")));
        waiting.insert(id, format!("{number}\n"));
    }
    let mut times = Vec::new();
    let mut left = count;
    while left > 0 {
        let (id, said) = client.next().unwrap();
        let Some(expected) = waiting.get(&id) else {
            continue; // the flood's
        };
        match said {
            Said::Output(_, data) => {
                assert_eq!(data, expected.as_bytes(), "records are never mixed");
                times.push(began.elapsed());
            }
            Said::Exit(record) => {
                assert_eq!(record.cause, Cause::Exited(0));
                left -= 1;
            }
            _ => {}
        }
    }
    assert_eq!(times.len(), count);
    times
}

#[test]
fn ex12_a_flood_at_most_doubles_the_first_byte_of_nineteen_others() {
    let _alone = alone();
    const ROUNDS: usize = 9;
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let mut flood = sh("exec yes");
    flood.output_limit = None;
    // What both have to load.
    first_bytes(&mut client, 19);
    let [mut without, mut with] = [Vec::new(), Vec::new()];
    // In turns: whatever else this machine does meets both.
    for _ in 0..ROUNDS {
        without.push(median(first_bytes(&mut client, 19)));
        let id = client.exec(&flood);
        client.started(id);
        // It flows before the others begin, and has not ended when they have.
        let mut seen = 0;
        while seen < 1 << 20 {
            match client.next_of(id) {
                Some(Said::Output(_, data)) => seen += data.len(),
                other => panic!("{other:?}"),
            }
        }
        with.push(median(first_bytes(&mut client, 19)));
        client.cancel(id, 0);
        let flood = client.finish(id);
        assert_eq!(*flood.cause(), Cause::Cancelled(CancelReason::Request));
    }
    let (without, with) = (median(without), median(with));
    assert!(with <= 2 * without, "{with:?} beside {without:?}");
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}
