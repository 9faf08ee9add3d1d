//! Flow control of one connection (virtio 1.2, section 5.10.6.3). Pure: no I/O, no clock.
//!
//! ```text
//!   to the guest                                     from the guest
//!   sent        (our tx_cnt, wraps)                  received      (wraps)
//!   peer_forwarded, peer_window  (it told us)        forwarded     (went to the host's socket)
//!   free = window - (sent - forwarded)               told          (the last forwarded it heard of)
//! ```
//!
//! All counters wrap at 2^32; only differences mean anything. The guest may shrink its window below
//! what is in flight (free is then zero, not negative), and may claim 4 GiB, which costs nothing
//! here: what goes to the guest is read from the host's socket straight into the guest's buffers.
//! What comes from it is bounded by our own window, and a guest that exceeds that has broken the
//! protocol.

use std::num::Wrapping;

/// The guest broke a rule of flow control; its connection is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CreditError {
    /// More data than our window has room for.
    #[error("{length} bytes sent with room for {room}")]
    Overrun {
        /// What it sent, in bytes.
        length: u32,
        /// What it might have sent.
        room: u32,
    },
    /// It acknowledged bytes that it cannot have received.
    #[error("{claimed} more bytes acknowledged, {in_flight} in flight")]
    Acknowledged {
        /// By how much its count went up (a count that went back shows as a huge one).
        claimed: u32,
        /// What could have been acknowledged.
        in_flight: u32,
    },
}

/// Both directions' counters.
#[derive(Clone, Debug)]
pub struct Credit {
    sent: Wrapping<u32>,
    peer_window: u32,
    peer_forwarded: Wrapping<u32>,
    window: u32,
    received: Wrapping<u32>,
    forwarded: Wrapping<u32>,
    told: Wrapping<u32>,
}

impl Credit {
    /// A connection that has carried nothing, with `window` bytes of room for what the guest sends.
    #[must_use]
    pub fn new(window: u32) -> Self {
        Self {
            sent: Wrapping(0),
            peer_window: 0,
            peer_forwarded: Wrapping(0),
            window,
            received: Wrapping(0),
            forwarded: Wrapping(0),
            told: Wrapping(0),
        }
    }

    /// Takes the two credit fields that every packet of the guest carries.
    ///
    /// # Errors
    /// [`CreditError::Acknowledged`], with nothing changed.
    pub fn heard(&mut self, buf_alloc: u32, fwd_cnt: u32) -> Result<(), CreditError> {
        let claimed = (Wrapping(fwd_cnt) - self.peer_forwarded).0;
        let in_flight = self.in_flight();
        if claimed > in_flight {
            return Err(CreditError::Acknowledged { claimed, in_flight });
        }
        self.peer_forwarded = Wrapping(fwd_cnt);
        self.peer_window = buf_alloc;
        Ok(())
    }

    /// How much may be sent to the guest now, in bytes.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.peer_window.saturating_sub(self.in_flight())
    }

    /// Counts data sent to the guest: at most [`Credit::free`].
    pub fn sent(&mut self, length: u32) {
        debug_assert!(length <= self.free());
        self.sent += length;
    }

    /// Counts data that the guest has sent.
    ///
    /// # Errors
    /// [`CreditError::Overrun`], with nothing changed.
    pub fn received(&mut self, length: u32) -> Result<(), CreditError> {
        let room = self.window - self.held();
        if length > room {
            return Err(CreditError::Overrun { length, room });
        }
        self.received += length;
        Ok(())
    }

    /// Counts data of the guest that has left our buffer. True if the guest should be told by a
    /// packet of its own: half of the window has been freed since it last heard.
    pub fn forwarded(&mut self, length: u32) -> bool {
        debug_assert!(length <= self.held());
        self.forwarded += length;
        // Linux since 2026 (6.1.192 has it) sends no more than its own receive buffer's size either,
        // whatever we offer: waiting for half of a larger window would stall it.
        let window = self.window.min(self.peer_window);
        (self.forwarded - self.told).0 >= (window / 2).max(1)
    }

    /// Our window, in bytes.
    #[must_use]
    pub fn window(&self) -> u32 {
        self.window
    }

    /// What the guest has sent and we still hold, in bytes.
    #[must_use]
    pub fn held(&self) -> u32 {
        (self.received - self.forwarded).0
    }

    /// The credit fields for a packet to the guest, which counts as having heard them.
    pub fn tell(&mut self) -> (u32, u32) {
        self.told = self.forwarded;
        (self.window, self.forwarded.0)
    }

    fn in_flight(&self) -> u32 {
        (self.sent - self.peer_forwarded).0
    }

    /// For tests: as if this much had been carried each way and acknowledged.
    #[cfg(test)]
    pub(super) fn advance(&mut self, bytes: u32) {
        for counter in [
            &mut self.sent,
            &mut self.peer_forwarded,
            &mut self.received,
            &mut self.forwarded,
            &mut self.told,
        ] {
            *counter += bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn vs09_shrunk_window_does_not_underflow() {
        let mut credit = Credit::new(1000);
        credit.heard(4096, 0).unwrap();
        credit.sent(4000);
        credit.heard(100, 0).unwrap();
        assert_eq!(credit.free(), 0);
        credit.heard(100, 3950).unwrap();
        assert_eq!(credit.free(), 50);
    }

    #[test]
    fn vs09_guest_that_sends_no_more_than_its_own_buffer_holds_is_told_in_time() {
        let mut credit = Credit::new(1 << 20);
        credit.heard(1000, 0).unwrap();
        credit.received(1000).unwrap();
        assert!(!credit.forwarded(499));
        assert!(credit.forwarded(501));
    }

    #[test]
    fn vs09_counters_wrap() {
        let mut credit = Credit::new(1000);
        credit.advance(u32::MAX - 10);
        credit.heard(100, u32::MAX - 10).unwrap();
        credit.sent(100);
        credit.received(1000).unwrap();
        assert_eq!(credit.free(), 0);
        assert!(credit.forwarded(500));
        assert_eq!(credit.tell(), (1000, 489));
        credit.heard(100, 49).unwrap();
        assert_eq!(credit.free(), 60);
        assert_eq!(credit.held(), 500);
    }

    #[test]
    fn vs09_four_gib_window_is_taken_at_its_word() {
        let mut credit = Credit::new(1000);
        credit.heard(u32::MAX, 0).unwrap();
        assert_eq!(credit.free(), u32::MAX);
        credit.sent(u32::MAX);
        assert_eq!(credit.free(), 0);
        credit.heard(u32::MAX, u32::MAX).unwrap();
        assert_eq!(credit.free(), u32::MAX);
    }

    #[test]
    fn ho03_data_at_0_1_window_and_window_plus_1() {
        for (length, fits) in [(0, true), (1, true), (1000, true), (1001, false)] {
            assert_eq!(Credit::new(1000).received(length).is_ok(), fits, "{length}");
        }
        let mut credit = Credit::new(1000);
        credit.received(1000).unwrap();
        assert_eq!(
            credit.received(1),
            Err(CreditError::Overrun { length: 1, room: 0 })
        );
    }

    #[test]
    fn ho03_acknowledging_more_than_was_sent_or_going_back_is_refused() {
        let mut credit = Credit::new(1000);
        credit.heard(100, 0).unwrap();
        credit.sent(50);
        assert!(credit.heard(100, 51).is_err());
        credit.heard(100, 50).unwrap();
        assert!(credit.heard(100, 49).is_err());
        assert_eq!(credit.free(), 100);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Send(u32),
        Heard(u32, u32),
        Receive(u32),
        Forward(u32),
        Tell,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let number = || prop_oneof![0..=3u32, 0..=70_000u32, any::<u32>()];
        prop::collection::vec(
            prop_oneof![
                number().prop_map(Step::Send),
                (number(), number()).prop_map(|(window, count)| Step::Heard(window, count)),
                number().prop_map(Step::Receive),
                number().prop_map(Step::Forward),
                Just(Step::Tell),
            ],
            0..100,
        )
    }

    proptest! {
        /// Whatever the guest claims: never more in flight than it allowed, never more held than
        /// our window.
        #[test]
        fn vs09_no_claim_breaks_the_bounds(start in any::<u32>(), steps in steps()) {
            const WINDOW: u32 = 65_536;
            let mut credit = Credit::new(WINDOW);
            credit.advance(start);
            let (mut in_flight, mut held) = (0u64, 0u64);
            for step in steps {
                match step {
                    Step::Send(bytes) => {
                        let bytes = bytes.min(credit.free());
                        credit.sent(bytes);
                        in_flight += u64::from(bytes);
                    }
                    Step::Heard(window, ahead) => {
                        let count = (credit.peer_forwarded + Wrapping(ahead)).0;
                        let accepted = credit.heard(window, count).is_ok();
                        prop_assert_eq!(accepted, u64::from(ahead) <= in_flight);
                        if accepted {
                            in_flight -= u64::from(ahead);
                            prop_assert_eq!(u64::from(credit.free()), u64::from(window).saturating_sub(in_flight));
                        }
                    }
                    Step::Receive(bytes) => {
                        let accepted = credit.received(bytes).is_ok();
                        prop_assert_eq!(accepted, held + u64::from(bytes) <= u64::from(WINDOW));
                        if accepted {
                            held += u64::from(bytes);
                        }
                    }
                    Step::Forward(bytes) => {
                        let bytes = bytes.min(credit.held());
                        let tell = credit.forwarded(bytes);
                        held -= u64::from(bytes);
                        // A guest that is out of credit is told as soon as we hold nothing.
                        if held == 0 && credit.received - credit.told == Wrapping(WINDOW) {
                            prop_assert!(tell);
                        }
                    }
                    Step::Tell => {
                        credit.tell();
                    }
                }
                prop_assert_eq!(u64::from(credit.held()), held);
            }
        }
    }
}
