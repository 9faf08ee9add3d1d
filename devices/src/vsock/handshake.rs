//! The line by which a client on the host asks for a port in the guest. Pure: no I/O.
//!
//! ```text
//! CONNECT <port> <counter>-<nonce>\n   ->  OK <host port> <counter>\n     any port, the agent's included
//! CONNECT <port>\n                     ->  OK <host port>\n               a workload's port only
//!                                      ->  ERR STALE ...\n  ERR NOT_READY ...\n  ERR REFUSED ...\n, and the end
//! ```
//!
//! Everything here is decided before the guest hears of the client.

use std::fmt;

use super::{Fence, hex};

/// The longest line taken, its line feed included, in bytes. The longest sensible one has 83.
pub const MAX_LINE: usize = 128;

/// What a client has asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The port in the guest.
    pub port: u32,
    /// Whether it has named the generation, and the answer does too.
    pub tagged: bool,
}

/// Why a client does not get what it asked for; [`fmt::Display`] is the line it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It knows another generation than this one, whose counter is given.
    Stale(u64),
    /// The guest cannot take it yet: worth another try.
    NotReady(&'static str),
    /// It will not be served.
    Refused(&'static str),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stale(counter) => writeln!(f, "ERR STALE this is generation {counter}"),
            Self::NotReady(reason) => writeln!(f, "ERR NOT_READY {reason}"),
            Self::Refused(reason) => writeln!(f, "ERR REFUSED {reason}"),
        }
    }
}

/// What the decision depends on, besides the line.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// This life.
    pub fence: &'a Fence,
    /// The agent's port, which only a tagged line reaches.
    pub agent_port: u32,
    /// Whether the agent is ready.
    pub agent_ready: bool,
    /// Whether the guest's driver runs.
    pub active: bool,
}

impl Situation<'_> {
    /// Judges a line, which comes without its line feed.
    ///
    /// # Errors
    /// The [`Refusal`] to send.
    pub fn judge(&self, line: &[u8]) -> Result<Asked, Refusal> {
        let (port, tag) = parse(line).ok_or(Refusal::Refused("malformed request"))?;
        match tag {
            Some(tag)
                if tag != (self.fence.counter, self.fence.nonce)
                    && !super::negative_control("GE11") =>
            {
                return Err(Refusal::Stale(self.fence.counter));
            }
            None if self.fence.require_generation => {
                return Err(Refusal::Refused("this sandbox requires a generation"));
            }
            None if port == self.agent_port => {
                return Err(Refusal::Refused("the agent's port requires a generation"));
            }
            _ => {}
        }
        if !self.active {
            return Err(Refusal::NotReady("the guest has no vsock driver yet"));
        }
        if port == self.agent_port && !self.agent_ready {
            return Err(Refusal::NotReady("the agent is not ready"));
        }
        Ok(Asked {
            port,
            tagged: tag.is_some(),
        })
    }
}

/// The answer to a client whose connection the guest has accepted.
#[must_use]
pub fn accepted(host_port: u32, counter: Option<u64>) -> String {
    match counter {
        Some(counter) => format!("OK {host_port} {counter}\n"),
        None => format!("OK {host_port}\n"),
    }
}

type Tag = (u64, [u8; 16]);

fn parse(line: &[u8]) -> Option<(u32, Option<Tag>)> {
    let line = std::str::from_utf8(line).ok()?;
    let mut words = line.split_ascii_whitespace();
    if words.next()? != "CONNECT" {
        return None;
    }
    let port = number(words.next()?)?;
    let tag = match words.next() {
        None => None,
        Some(word) => {
            let (counter, nonce) = word.split_once('-')?;
            Some((number(counter)?, hex::decode(nonce)?))
        }
    };
    words.next().is_none().then_some((port, tag))
}

/// Digits alone: `parse` of the standard library takes a sign as well.
fn number<T: std::str::FromStr>(word: &str) -> Option<T> {
    if !word.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    word.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NONCE: &str = "000102030405060708090a0b0c0d0e0f";

    fn fence(require_generation: bool) -> Fence {
        Fence {
            counter: 7,
            nonce: std::array::from_fn(|index| index as u8),
            require_generation,
        }
    }

    fn situation(fence: &Fence) -> Situation<'_> {
        Situation {
            fence,
            agent_port: 1000,
            agent_ready: true,
            active: true,
        }
    }

    #[test]
    fn tagged_line_reaches_the_agent_and_plain_line_a_workload() {
        let fence = fence(false);
        let line = format!("CONNECT 1000 7-{NONCE}");
        let asked = |port, tagged| Ok(Asked { port, tagged });
        assert_eq!(situation(&fence).judge(line.as_bytes()), asked(1000, true));
        assert_eq!(situation(&fence).judge(b"CONNECT 5000"), asked(5000, false));
        assert_eq!(accepted(1 << 30, Some(7)), "OK 1073741824 7\n");
        assert_eq!(accepted(1 << 30, None), "OK 1073741824\n");
    }

    #[test]
    fn ge11_other_counter_or_nonce_is_stale_even_before_the_guest_is_up() {
        let fence = fence(false);
        let sleeping = Situation {
            active: false,
            agent_ready: false,
            ..situation(&fence)
        };
        let other_nonce = NONCE.replace("0f", "0e");
        for line in [
            format!("CONNECT 1000 6-{NONCE}"),
            format!("CONNECT 1000 7-{other_nonce}"),
        ] {
            let refusal = sleeping.judge(line.as_bytes()).unwrap_err();
            assert_eq!(refusal, Refusal::Stale(7));
            assert_eq!(refusal.to_string(), "ERR STALE this is generation 7\n");
        }
    }

    #[test]
    fn plain_line_never_reaches_the_agent_nor_a_fenced_sandbox() {
        let open = fence(false);
        let fenced = fence(true);
        assert!(matches!(
            situation(&open).judge(b"CONNECT 1000"),
            Err(Refusal::Refused(_))
        ));
        assert!(matches!(
            situation(&fenced).judge(b"CONNECT 5000"),
            Err(Refusal::Refused(_))
        ));
    }

    #[test]
    fn vs11_not_ready_is_told_apart() {
        let fence = fence(false);
        let line = format!("CONNECT 1000 7-{NONCE}");
        let booting = Situation {
            active: false,
            ..situation(&fence)
        };
        assert!(matches!(
            booting.judge(b"CONNECT 5000"),
            Err(Refusal::NotReady(_))
        ));
        let starting = Situation {
            agent_ready: false,
            ..situation(&fence)
        };
        assert!(matches!(
            starting.judge(line.as_bytes()),
            Err(Refusal::NotReady(_))
        ));
        // A workload's port does not wait for the agent: `--no-agent` guests never have one.
        assert!(starting.judge(b"CONNECT 5000").is_ok());
    }

    #[test]
    fn malformed_lines_are_refused() {
        let fence = fence(false);
        for line in [
            "",
            "CONNECT",
            "connect 5000",
            "CONNECT +5000",
            "CONNECT -1",
            "CONNECT 4294967296",
            "CONNECT 5000 7",
            "CONNECT 5000 7-",
            "CONNECT 5000 7-0001",
            "CONNECT 5000 -000102030405060708090a0b0c0d0e0f",
            "CONNECT 5000 7-000102030405060708090a0b0c0d0e0g",
            "CONNECT 5000 7-000102030405060708090a0b0c0d0e0f0",
            "CONNECT 5000 7-000102030405060708090a0b0c0d0e0f x",
        ] {
            let refusal = situation(&fence).judge(line.as_bytes()).unwrap_err();
            assert_eq!(refusal, Refusal::Refused("malformed request"), "{line}");
        }
    }

    #[test]
    fn ho03_ports_at_0_1_and_max() {
        let fence = fence(false);
        for port in [0, 1, u32::MAX] {
            let line = format!("CONNECT {port}");
            assert_eq!(situation(&fence).judge(line.as_bytes()).unwrap().port, port);
        }
        let longest = format!("CONNECT {} {}-{NONCE}\n", u32::MAX, u64::MAX);
        assert!(longest.len() <= MAX_LINE, "{}", longest.len());
    }

    proptest! {
        #[test]
        fn no_line_of_noise_gets_through(line in prop::collection::vec(any::<u8>(), 0..MAX_LINE)) {
            let fence = fence(true);
            prop_assert!(situation(&fence).judge(&line).is_err());
        }
    }
}
