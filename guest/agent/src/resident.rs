//! How much memory the agent itself has in use.

use std::path::Path;

/// Bytes of this process that are in memory, as the kernel says; `None` where it does not.
pub fn bytes() -> Option<u64> {
    let text = crate::files::read(Path::new("/proc/self/statm"), 256).ok()?;
    pages(std::str::from_utf8(&text).ok()?)?.checked_mul(rustix::param::page_size() as u64)
}

/// The second field of a `statm`: resident pages.
fn pages(statm: &str) -> Option<u64> {
    statm.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resident_pages_are_the_second_field_of_statm() {
        assert_eq!(pages("600 147 12 100 0 90 0\n"), Some(147));
        assert_eq!(pages("600"), None);
        assert_eq!(pages("600 many"), None);
        let own = bytes().unwrap();
        assert!(own > 100 << 10, "{own}");
    }
}
