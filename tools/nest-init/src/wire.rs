//! Chunks on a port, and the messages of the control port.

use std::io::{self, Read, Write};

/// The longest chunk, in bytes: an environment and an argument list must fit.
pub const CHUNK_MAX: usize = 8 << 20;

/// The bytes that a stream moves at a time.
pub const BLOCK: usize = 64 << 10;

/// The number of each port on the virtio-serial device, and its device node `/dev/vport0p<number>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Port {
    /// Messages in both directions.
    Control = 1,
    /// The command's standard input.
    Stdin = 2,
    /// Its standard output, or the terminal's.
    Stdout = 3,
    /// Its standard error.
    Stderr = 4,
}

/// Writes `data` as one chunk; an empty one is the stream's end.
pub fn write_chunk(port: &mut impl Write, data: &[u8]) -> io::Result<()> {
    let length = u32::try_from(data.len())
        .ok()
        .filter(|_| data.len() <= CHUNK_MAX)
        .ok_or_else(|| malformed("chunk too long"))?;
    // One write: on the nest's side each is a trip through the emulated device.
    let mut chunk = Vec::with_capacity(4 + data.len());
    chunk.extend_from_slice(&length.to_le_bytes());
    chunk.extend_from_slice(data);
    port.write_all(&chunk)
}

/// Reads the next chunk; an empty one is the stream's end.
pub fn read_chunk(port: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    port.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > CHUNK_MAX {
        return Err(malformed("chunk too long"));
    }
    let mut data = vec![0; length];
    port.read_exact(&mut data)?;
    Ok(data)
}

/// A terminal's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Height in characters.
    pub rows: u16,
    /// Width in characters.
    pub columns: u16,
}

/// What the nest is to run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Job {
    /// Command and arguments.
    pub argv: Vec<Vec<u8>>,
    /// The whole environment, each entry `NAME=value`.
    pub env: Vec<Vec<u8>>,
    /// Working directory.
    pub cwd: Vec<u8>,
    /// Where the writable share is mounted: a folder that exists on the host.
    pub out: Vec<u8>,
    /// A terminal of this size in place of the pipes.
    pub terminal: Option<Size>,
}

/// A message from the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToNest {
    /// The first and only one of its kind.
    Job(Job),
    /// The terminal has a new size.
    Resize(Size),
    /// Nothing but the interrupt that it comes with, which wakes a nest that has missed another one.
    Poke,
}

/// A message to the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToHost {
    /// Init has its ports and waits for the job.
    Up,
    /// The nest still makes progress; one every [`BEAT`].
    Beat,
    /// The nest could not do its part, or the command could not be started (127 not found, 126 otherwise).
    Failed {
        /// The status to leave with.
        status: u8,
        /// What failed, in words.
        message: String,
    },
    /// The command has ended, its streams are whole and the writable share is on the host.
    Exit {
        /// Its exit code, or 128 and the signal that ended it.
        status: u8,
    },
}

/// Time between two beats.
pub const BEAT: std::time::Duration = std::time::Duration::from_secs(2);

impl ToNest {
    /// The message as a chunk's bytes.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Job(job) => {
                let mut out = vec![1];
                put_list(&mut out, &job.argv);
                put_list(&mut out, &job.env);
                put(&mut out, &job.cwd);
                put(&mut out, &job.out);
                match job.terminal {
                    Some(size) => put_size(&mut out, size),
                    None => put_size(
                        &mut out,
                        Size {
                            rows: 0,
                            columns: 0,
                        },
                    ),
                }
                out
            }
            Self::Resize(size) => {
                let mut out = vec![2];
                put_size(&mut out, *size);
                out
            }
            Self::Poke => vec![3],
        }
    }

    /// The message of a chunk.
    pub fn decode(chunk: &[u8]) -> io::Result<Self> {
        let mut fields = Fields(chunk);
        let message = match fields.byte()? {
            1 => Self::Job(Job {
                argv: fields.list()?,
                env: fields.list()?,
                cwd: fields.bytes()?,
                out: fields.bytes()?,
                terminal: Some(fields.size()?).filter(|size| size.rows != 0),
            }),
            2 => Self::Resize(fields.size()?),
            3 => Self::Poke,
            _ => return Err(malformed("unknown message")),
        };
        fields.end(message)
    }
}

impl ToHost {
    /// The message as a chunk's bytes.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Up => vec![1],
            Self::Beat => vec![2],
            Self::Failed { status, message } => {
                let mut out = vec![3, *status];
                put(&mut out, message.as_bytes());
                out
            }
            Self::Exit { status } => vec![4, *status],
        }
    }

    /// The message of a chunk.
    pub fn decode(chunk: &[u8]) -> io::Result<Self> {
        let mut fields = Fields(chunk);
        let message = match fields.byte()? {
            1 => Self::Up,
            2 => Self::Beat,
            3 => Self::Failed {
                status: fields.byte()?,
                message: String::from_utf8_lossy(&fields.bytes()?).into_owned(),
            },
            4 => Self::Exit {
                status: fields.byte()?,
            },
            _ => return Err(malformed("unknown message")),
        };
        fields.end(message)
    }
}

fn malformed(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    // Lengths above u32 cannot pass write_chunk's limit anyway.
    out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    out.extend_from_slice(bytes);
}

fn put_list(out: &mut Vec<u8>, list: &[Vec<u8>]) {
    out.extend_from_slice(&(list.len() as u32).to_le_bytes());
    for bytes in list {
        put(out, bytes);
    }
}

fn put_size(out: &mut Vec<u8>, size: Size) {
    out.extend_from_slice(&size.rows.to_le_bytes());
    out.extend_from_slice(&size.columns.to_le_bytes());
}

/// What is left of a message.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take(&mut self, length: usize) -> io::Result<&[u8]> {
        let (taken, rest) = self
            .0
            .split_at_checked(length)
            .ok_or_else(|| malformed("message cut short"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn byte(&mut self) -> io::Result<u8> {
        Ok(self.take(1)?[0])
    }

    fn u32(&mut self) -> io::Result<usize> {
        let bytes = self.take(4)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize)
    }

    fn bytes(&mut self) -> io::Result<Vec<u8>> {
        let length = self.u32()?;
        Ok(self.take(length)?.to_vec())
    }

    fn list(&mut self) -> io::Result<Vec<Vec<u8>>> {
        (0..self.u32()?).map(|_| self.bytes()).collect()
    }

    fn size(&mut self) -> io::Result<Size> {
        let bytes = self.take(4)?;
        Ok(Size {
            rows: u16::from_le_bytes([bytes[0], bytes[1]]),
            columns: u16::from_le_bytes([bytes[2], bytes[3]]),
        })
    }

    fn end<T>(self, message: T) -> io::Result<T> {
        if self.0.is_empty() {
            Ok(message)
        } else {
            Err(malformed("bytes after the message"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job() -> Job {
        Job {
            argv: vec![b"sh".to_vec(), b"-c".to_vec(), b"exit 9".to_vec()],
            env: vec![b"A=\xff".to_vec(), b"B=".to_vec()],
            cwd: b"/tmp/x".to_vec(),
            out: b"/out".to_vec(),
            terminal: Some(Size {
                rows: 24,
                columns: 80,
            }),
        }
    }

    #[test]
    fn messages_survive_the_round_trip() {
        for message in [
            ToNest::Job(job()),
            ToNest::Job(Job {
                terminal: None,
                ..job()
            }),
            ToNest::Poke,
            ToNest::Resize(Size {
                rows: 1,
                columns: 2,
            }),
        ] {
            assert_eq!(ToNest::decode(&message.encode()).unwrap(), message);
        }
        for message in [
            ToHost::Up,
            ToHost::Beat,
            ToHost::Failed {
                status: 127,
                message: "x: not found".into(),
            },
            ToHost::Exit { status: 9 },
        ] {
            assert_eq!(ToHost::decode(&message.encode()).unwrap(), message);
        }
    }

    #[test]
    fn a_message_cut_anywhere_or_lengthened_is_refused() {
        let whole = ToNest::Job(job()).encode();
        for length in 0..whole.len() {
            assert!(ToNest::decode(&whole[..length]).is_err(), "{length}");
        }
        let mut longer = whole;
        longer.push(0);
        assert!(ToNest::decode(&longer).is_err());
    }

    #[test]
    fn a_chunk_beyond_the_limit_is_refused_before_it_is_read() {
        let mut port: &[u8] = &u32::MAX.to_le_bytes();
        assert_eq!(
            read_chunk(&mut port).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }
}
