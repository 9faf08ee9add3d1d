//! Generations of a sandbox, and later its snapshots.
