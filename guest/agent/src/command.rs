//! From a request to what the child needs: arguments, environment, user, pipes or a terminal.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize as TerminalSize;
use rustix::thread::{CapabilitySet, Gid, Uid};
use vmm_protocol::{ExecRequest, StartStage, Winsize};

use crate::sys::spawn::{ChildStdio, Failure, Plan, User};

/// Where programs are looked for unless the request says otherwise.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Bytes that an output pipe holds.
const OUTPUT_PIPE: usize = 256 << 10;

/// The agent's ends of a workload's descriptors; all non-blocking.
#[derive(Debug)]
pub struct Ends {
    /// Write end of stdin; `None` once it is closed from the start.
    pub stdin: Option<OwnedFd>,
    /// Read end of stdout, or of the terminal.
    pub stdout: OwnedFd,
    /// Read end of stderr; a terminal has none.
    pub stderr: Option<OwnedFd>,
    /// The terminal, for resizing it.
    pub terminal: Option<OwnedFd>,
}

/// Makes the plan of a request and our ends of its descriptors.
///
/// # Errors
/// [`StartStage::Pipes`] when descriptors run out; [`StartStage::Execute`] for a string that
/// holds a zero byte.
pub fn prepare(
    request: &ExecRequest,
    ours: &[(&str, String)],
    confine: Option<CapabilitySet>,
) -> Result<(Plan, Ends), Failure> {
    let user = request.user.as_ref().map(|user| User {
        uid: Uid::from_raw(user.uid),
        gid: Gid::from_raw(user.gid),
        groups: user
            .groups
            .iter()
            .map(|group| Gid::from_raw(*group))
            .collect(),
    });
    let env = environment(request, ours, &home(user.as_ref()));
    let path = env
        .iter()
        .find_map(|entry| entry.strip_prefix(b"PATH="))
        .unwrap_or(PATH.as_bytes())
        .to_vec();
    let program = request.argv.first().map(Vec::as_slice).unwrap_or_default();
    let (stdio, ends) = match request.tty {
        Some(size) => terminal(size, user.as_ref()),
        None => pipes(request.stdin),
    }
    .map_err(Failure::at(StartStage::Pipes))?;
    let directory = if request.cwd.is_empty() {
        b"/".to_vec()
    } else {
        request.cwd.clone()
    };
    let plan = Plan {
        programs: strings(candidates(program, &path))?,
        argv: strings(request.argv.iter().cloned())?,
        env: strings(env)?,
        directory: string(directory)?,
        user,
        confine,
        stdio,
    };
    Ok((plan, ends))
}

/// Sets a terminal's size; its foreground processes get SIGWINCH.
///
/// # Errors
/// What the kernel says.
pub fn resize(terminal: impl AsFd, size: Winsize) -> Result<(), Errno> {
    let size = TerminalSize {
        ws_row: size.rows,
        ws_col: size.columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    rustix::termios::tcsetwinsize(terminal, size)
}

fn pipes(stdin: bool) -> Result<(ChildStdio, Ends), Errno> {
    let (stdin_out, stdin_in) = pipe_with(PipeFlags::CLOEXEC)?;
    let (stdout_out, stdout_in) = pipe_with(PipeFlags::CLOEXEC)?;
    let (stderr_out, stderr_in) = pipe_with(PipeFlags::CLOEXEC)?;
    // Room for four reads' worth, so that a workload that floods is switched to less often. Where
    // it is not to be had the default does.
    for end in [&stdout_out, &stderr_out] {
        let _ = rustix::pipe::fcntl_setpipe_size(end, OUTPUT_PIPE);
    }
    // Only our ends: a workload finds its own blocking, as it would anywhere.
    for end in [&stdin_in, &stdout_out, &stderr_out] {
        rustix::io::ioctl_fionbio(end, true)?;
    }
    let ends = Ends {
        stdin: stdin.then_some(stdin_in),
        stdout: stdout_out,
        stderr: Some(stderr_out),
        terminal: None,
    };
    Ok((
        ChildStdio::Pipes {
            stdin: stdin_out,
            stdout: stdout_in,
            stderr: stderr_in,
        },
        ends,
    ))
}

fn terminal(size: Winsize, user: Option<&User>) -> Result<(ChildStdio, Ends), Errno> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let ours = rustix::pty::openpt(flags)?;
    rustix::pty::unlockpt(&ours)?;
    let theirs = rustix::pty::ioctl_tiocgptpeer(&ours, flags)?;
    resize(&ours, size)?;
    if let Some(user) = user {
        // So that it may open its own terminal by name; the group is that of devpts.
        rustix::fs::fchown(&theirs, Some(user.uid), None)?;
    }
    rustix::io::ioctl_fionbio(&ours, true)?;
    // One file, watched for reading and for writing apart: two descriptors.
    let stdin = rustix::io::fcntl_dupfd_cloexec(&ours, 3)?;
    let stdout = rustix::io::fcntl_dupfd_cloexec(&ours, 3)?;
    let ends = Ends {
        stdin: Some(stdin),
        stdout,
        stderr: None,
        terminal: Some(ours),
    };
    Ok((ChildStdio::Terminal(theirs), ends))
}

/// The environment: our few defaults, then what is the guest's, then the request's; of one name
/// the last entry holds, at the place of the first.
fn environment(request: &ExecRequest, ours: &[(&str, String)], home: &[u8]) -> Vec<Vec<u8>> {
    let entry = |name: &str, value: &[u8]| [name.as_bytes(), b"=", value].concat();
    let mut entries = vec![entry("PATH", PATH.as_bytes()), entry("HOME", home)];
    if request.tty.is_some() {
        entries.push(entry("TERM", b"xterm"));
    }
    entries.extend(
        ours.iter()
            .map(|(name, value)| entry(name, value.as_bytes())),
    );
    entries.extend(request.env.iter().cloned());

    let name = |entry: &Vec<u8>| {
        let end = entry
            .iter()
            .position(|byte| *byte == b'=')
            .unwrap_or(entry.len());
        entry.get(..end).unwrap_or_default().to_vec()
    };
    let mut places = std::collections::HashMap::new();
    let mut result: Vec<Vec<u8>> = Vec::with_capacity(entries.len());
    for entry in entries {
        match places
            .get(&name(&entry))
            .and_then(|place: &usize| result.get_mut(*place))
        {
            Some(earlier) => *earlier = entry,
            None => {
                places.insert(name(&entry), result.len());
                result.push(entry);
            }
        }
    }
    result
}

/// What `execvp` would try: the program itself if it has a slash, else it in each folder.
fn candidates(program: &[u8], path: &[u8]) -> Vec<Vec<u8>> {
    if program.contains(&b'/') {
        return vec![program.to_vec()];
    }
    path.split(|byte| *byte == b':')
        .map(|folder| match folder {
            b"" => program.to_vec(),
            folder => [folder, b"/", program].concat(),
        })
        .collect()
}

/// The user's home by the image's passwd file, or `/`.
fn home(user: Option<&User>) -> Vec<u8> {
    let uid = user.map_or(0, |user| user.uid.as_raw()).to_string();
    let passwd = crate::files::read(Path::new("/etc/passwd"), 1 << 20).unwrap_or_default();
    let home = passwd.split(|byte| *byte == b'\n').find_map(|line| {
        let mut fields = line.split(|byte| *byte == b':');
        let found = fields.nth(2)? == uid.as_bytes();
        fields.nth(2).filter(|home| found && home.starts_with(b"/"))
    });
    home.unwrap_or(b"/").to_vec()
}

fn strings(all: impl IntoIterator<Item = Vec<u8>>) -> Result<Vec<CString>, Failure> {
    all.into_iter().map(string).collect()
}

fn string(bytes: Vec<u8>) -> Result<CString, Failure> {
    CString::new(bytes).map_err(|_| Failure {
        stage: StartStage::Execute,
        errno: Errno::INVAL,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(request: &ExecRequest) -> Vec<String> {
        let all = environment(request, &[("VMM_GENERATION", "1-x".into())], b"/root");
        all.iter()
            .map(|entry| String::from_utf8_lossy(entry).into_owned())
            .collect()
    }

    #[test]
    fn ex18_environment_is_defaults_then_the_requests_and_the_last_of_a_name_holds() {
        let mut request = ExecRequest::new(["x"]);
        let path = format!("PATH={PATH}");
        assert_eq!(
            names(&request),
            [path.as_str(), "HOME=/root", "VMM_GENERATION=1-x"]
        );
        request.env = vec![
            b"A=1".to_vec(),
            b"HOME=/h".to_vec(),
            b"A=2=3\n".to_vec(),
            b"B=\xff".to_vec(),
        ];
        let expected = [
            path.as_str(),
            "HOME=/h",
            "VMM_GENERATION=1-x",
            "A=2=3\n",
            "B=\u{fffd}",
        ];
        assert_eq!(names(&request), expected);
    }

    #[test]
    fn programs_are_searched_as_execvp_does() {
        let found = |program: &str, path: &str| -> Vec<String> {
            candidates(program.as_bytes(), path.as_bytes())
                .iter()
                .map(|path| String::from_utf8_lossy(path).into_owned())
                .collect()
        };
        assert_eq!(found("sh", "/a:/b"), ["/a/sh", "/b/sh"]);
        assert_eq!(found("sh", ":/b"), ["sh", "/b/sh"]);
        assert_eq!(found("./sh", "/a:/b"), ["./sh"]);
    }
}
