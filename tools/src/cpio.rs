//! Writes an initramfs: a cpio archive in the "newc" format (Documentation/driver-api/early-userspace/buffer-format.rst).
//!
//! The same content gives the same bytes: no times, no owners but root, inodes in order.

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
const CHARACTER: u32 = 0o020_000;

/// An archive that grows entry by entry. Paths have no leading `/`; a folder stands before what is in it.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    inode: u32,
}

impl Archive {
    /// Adds a folder.
    pub fn folder(&mut self, path: &str, mode: u32) {
        self.entry(path, DIRECTORY | mode, (0, 0), b"");
    }

    /// Adds a file.
    pub fn file(&mut self, path: &str, mode: u32, data: &[u8]) {
        self.entry(path, REGULAR | mode, (0, 0), data);
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, to: &str) {
        self.entry(path, LINK | 0o777, (0, 0), to.as_bytes());
    }

    /// Adds a character device.
    pub fn device(&mut self, path: &str, mode: u32, major: u32, minor: u32) {
        self.entry(path, CHARACTER | mode, (major, minor), b"");
    }

    /// The whole archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.inode = 0;
        self.entry("TRAILER!!!", 0, (0, 0), b"");
        // The kernel reads on after the trailer, so that another archive may follow at a multiple of four.
        self.bytes
    }

    /// The whole archive behind another, whose files it adds to or replaces.
    pub fn behind(self, mut first: Vec<u8>) -> Vec<u8> {
        first.resize(first.len().next_multiple_of(4), 0);
        first.extend(self.finish());
        first
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), data: &[u8]) {
        self.inode += 1;
        let links = if mode & DIRECTORY != 0 { 2 } else { 1 };
        let fields = [
            self.inode,
            mode,
            0, // uid
            0, // gid
            links,
            0, // mtime
            data.len() as u32,
            0, // device of the file itself
            0,
            device.0,
            device.1,
            path.len() as u32 + 1,
            0, // checksum, unused in this format
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(data);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_has_padded_entries_and_a_trailer() {
        let mut archive = Archive::default();
        archive.folder("a", 0o755);
        archive.file("a/b", 0o644, b"hello");
        archive.link("c", "a/b");
        archive.device("d", 0o600, 5, 1);
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8(bytes).unwrap();
        assert!(text.starts_with("07070100000001000041ed0000000000000000000000020000000000000000"));
        assert_eq!(text.matches("070701").count(), 5);
        // 110 bytes of header and `a/b` with its NUL are 114: two of padding, then the data.
        assert!(text.contains("a/b\0\0\0hello\0\0\x00070701"));
        assert!(text.trim_end_matches('\0').ends_with("TRAILER!!!"));

        let second = Archive::default().behind(b"12345".into());
        assert!(second.starts_with(b"12345\0\0\x00070701"));
    }
}
