//! Pooled sessions: within a generation one, across generations none.

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test says so by failing"
)]

mod common;

use common::{GENERATION, with_agent};
use vmm_client::{ConnectError, GenerationTag, Pool, Session};
use vmm_protocol::GenerationId;

fn tag(counter: u64) -> GenerationTag {
    let id = GenerationId {
        counter,
        ..GENERATION
    };
    GenerationTag::new(id, [7; 16])
}

/// A session with an agent that serves it; which generation the pool takes it for is the test's affair.
fn open() -> Result<Session, ConnectError> {
    Ok(with_agent(|agent| agent.serve()).0)
}

fn never() -> Result<Session, ConnectError> {
    panic!("nothing is to be connected")
}

#[test]
fn a_session_is_used_again_within_its_generation_and_never_across() {
    let pool = Pool::default();
    let first = pool.session_with("box", &tag(5), open).unwrap();
    for _ in 0..10 {
        pool.session_with("box", &tag(5), never).unwrap();
    }
    let second = pool.session_with("box", &tag(6), open).unwrap();
    assert!(first.lost().is_some(), "the older one is closed at once");
    assert!(second.lost().is_none());
    // A client that still holds the older life's name is refused without a connection, and
    // displaces nothing.
    let stale = pool.session_with("box", &tag(5), never).unwrap_err();
    assert!(matches!(stale, ConnectError::Stale { .. }), "{stale}");
    pool.session_with("box", &tag(6), never).unwrap();
    let counters = pool.counters();
    assert_eq!(
        (counters.reused, counters.connected, counters.stale),
        (11, 2, 1)
    );
}

#[test]
fn another_id_under_the_same_number_is_another_generation() {
    let pool = Pool::default();
    pool.session_with("box", &tag(5), open).unwrap();
    let other = GenerationId {
        counter: 5,
        public_id: !GENERATION.public_id,
    };
    let mut connected = false;
    pool.session_with("box", &GenerationTag::new(other, [7; 16]), || {
        connected = true;
        open()
    })
    .unwrap();
    assert!(connected);
}

#[test]
fn a_session_that_was_lost_is_replaced() {
    let pool = Pool::default();
    pool.session_with("box", &tag(5), open).unwrap().close();
    let again = pool.session_with("box", &tag(5), open).unwrap();
    assert!(again.lost().is_none());
    assert_eq!((pool.counters().lost, pool.counters().connected), (1, 2));
}

#[test]
fn sandboxes_are_apart_and_the_least_used_makes_room() {
    let pool = Pool::with_capacity(2);
    pool.session_with("a", &tag(5), open).unwrap();
    pool.session_with("b", &tag(5), open).unwrap();
    pool.session_with("a", &tag(5), never).unwrap();
    pool.session_with("c", &tag(1), open).unwrap();
    pool.session_with("a", &tag(5), never).unwrap();
    pool.session_with("b", &tag(5), open).unwrap();
    assert_eq!(pool.counters().evicted, 2);
    pool.forget("a");
    pool.session_with("a", &tag(1), open).unwrap();
}

#[test]
fn a_connect_that_fails_leaves_the_pool_as_it_was() {
    let pool = Pool::default();
    let failed = || {
        Err(ConnectError::NotReady {
            message: "soon".to_owned(),
        })
    };
    assert!(pool.session_with("box", &tag(5), failed).is_err());
    pool.session_with("box", &tag(5), open).unwrap();
    assert!(pool.session_with("box", &tag(6), failed).is_err());
    pool.session_with("box", &tag(5), never).unwrap();
}
