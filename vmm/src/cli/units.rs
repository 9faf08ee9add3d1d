//! Values with units as people write them: exact, never rounded through a float, refused with the value named.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use vmm_protocol::{Policy, User, units};

use crate::boot::cmdline as boot_cmdline;
use crate::{machine, memory};

/// Guest memory.
pub fn memory(text: &str) -> Result<u64, String> {
    let bytes = units::size(text).map_err(|error| error.to_string())?;
    memory::check(bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}

/// A number of vCPUs.
pub fn cpus(text: &str) -> Result<u8, String> {
    text.parse()
        .ok()
        .filter(|cpus| (1..=machine::MAX_CPUS).contains(cpus))
        .ok_or_else(|| format!("{text:?} vCPUs: use 1 to {}", machine::MAX_CPUS))
}

/// A part of a kernel command line.
pub fn cmdline(text: &str) -> Result<String, String> {
    boot_cmdline::check(text, None).map_err(|error| error.to_string())?;
    Ok(text.to_owned())
}

/// A path that is not empty.
pub fn folder(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() {
        Err("an empty path".to_owned())
    } else {
        Ok(text.into())
    }
}

/// A time that is not zero.
pub fn time(text: &str) -> Result<Duration, String> {
    units::timeout(text)
        .map(Duration::from_nanos)
        .map_err(|error| error.to_string())
}

/// The number of an exec in its guest.
pub fn exec(text: &str) -> Result<u64, String> {
    text.parse()
        .ok()
        .filter(|number| *number > 0)
        .ok_or_else(|| format!("{text:?} is no exec's number: 'vmm ps NAME' lists them"))
}

/// Offsets in stdout and stderr.
pub fn offsets(text: &str) -> Result<[u64; 2], String> {
    let parse = || {
        let (stdout, stderr) = text.split_once(',')?;
        Some([stdout.parse().ok()?, stderr.parse().ok()?])
    };
    parse().ok_or_else(|| format!("{text:?}: use STDOUT,STDERR in bytes, as in 5000,0"))
}

/// A time that may be zero.
pub fn grace(text: &str) -> Result<Duration, String> {
    match text {
        "0" | "0s" => Ok(Duration::ZERO),
        text => time(text),
    }
}

/// Names of the signals 1 to 31 (signal(7), x86), without their SIG.
pub const SIGNALS: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2",
    "PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG",
    "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
];

/// A signal's number, or its name in any case, with or without SIG.
pub fn signal(text: &str) -> Result<u8, String> {
    let name = text.to_ascii_uppercase();
    let name = name.strip_prefix("SIG").unwrap_or(&name);
    let number = match SIGNALS.iter().position(|known| *known == name) {
        Some(index) => u8::try_from(index + 1).ok(),
        None => text.parse().ok().filter(|number| (1..=64).contains(number)),
    };
    number.ok_or_else(|| format!("{text:?} is no signal: use a name such as TERM, or 1 to 64"))
}

/// A cap on output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputLimit(pub Option<u64>);

/// A cap on output, or `none`.
pub fn output_limit(text: &str) -> Result<OutputLimit, String> {
    units::output_limit(text)
        .map(OutputLimit)
        .map_err(|error| error.to_string())
}

/// What happens at the cap.
pub fn policy(text: &str) -> Result<Policy, String> {
    match text {
        "kill" => Ok(Policy::Kill),
        "drain" => Ok(Policy::Drain),
        _ => Err(format!("{text:?} is neither kill nor drain")),
    }
}

/// `NAME=VALUE`, in any bytes but NUL (which no argument can hold).
#[derive(Clone, Debug)]
pub struct EnvParser;

impl clap::builder::TypedValueParser for EnvParser {
    type Value = OsString;

    fn parse_ref(
        &self,
        command: &clap::Command,
        _: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<OsString, clap::Error> {
        match value.as_bytes().iter().position(|byte| *byte == b'=') {
            Some(1..) => Ok(value.to_owned()),
            _ => Err(clap::Error::raw(
                clap::error::ErrorKind::ValueValidation,
                format!("invalid value {value:?} for '--env': use NAME=VALUE\n"),
            )
            .with_cmd(command)),
        }
    }
}

/// `UID` or `UID:GID`; the group is the user's number where it is not given.
pub fn user(text: &str) -> Result<User, String> {
    let bad = || format!("{text:?} is not UID or UID:GID in numbers, for instance 1000:1000");
    let id = |part: &str| {
        // -1 as an id means "leave it" to the kernel.
        part.parse::<u32>()
            .ok()
            .filter(|id| *id != u32::MAX && part.starts_with(|c: char| c.is_ascii_digit()))
    };
    let (uid, gid) = text.split_once(':').unwrap_or((text, text));
    let (uid, gid) = (id(uid).ok_or_else(bad)?, id(gid).ok_or_else(bad)?);
    Ok(User {
        uid,
        gid,
        groups: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_go_by_name_and_number() {
        for (text, number) in [
            ("TERM", 15),
            ("sigkill", 9),
            ("10", 10),
            ("64", 64),
            ("Usr1", 10),
        ] {
            assert_eq!(signal(text), Ok(number), "{text}");
        }
        for text in ["", "0", "65", "-1", "SIG", "SIG9", "NONE", "1.5"] {
            assert!(
                signal(text).unwrap_err().contains(&format!("{text:?}")),
                "{text}"
            );
        }
    }

    #[test]
    fn numbers_of_execs_and_offsets_are_exact() {
        assert_eq!(exec("18446744073709551615"), Ok(u64::MAX));
        for text in ["", "0", "-1", "x", "1.0", "18446744073709551616"] {
            assert!(exec(text).is_err(), "{text}");
        }
        assert_eq!(offsets("5000,0"), Ok([5000, 0]));
        for text in ["", "5000", ",", "1,", "1,2,3", "-1,0", "1, 2", "1M,0"] {
            assert!(offsets(text).is_err(), "{text}");
        }
        assert_eq!(grace("0"), Ok(Duration::ZERO));
        assert!(grace("-1s").is_err());
    }

    #[test]
    fn units_are_exact() {
        assert_eq!(memory("256M"), Ok(256 << 20));
        assert_eq!(memory("4GiB"), Ok(4 << 30));
        assert_eq!(memory("0.5g"), Ok(512 << 20));
        assert_eq!(memory("8388608"), Ok(8 << 20));
        assert_eq!(time("10"), Ok(Duration::from_secs(10)));
        assert_eq!(time("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(time("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(output_limit("1M"), Ok(OutputLimit(Some(1 << 20))));
        assert_eq!(output_limit("none"), Ok(OutputLimit(None)));
    }

    #[test]
    fn ex16_timeouts_out_of_range_are_refused_with_the_value() {
        for text in [
            "-1",
            "-1s",
            "nan",
            "NaN",
            "inf",
            "infinity",
            "0",
            "0s",
            "0.0ms",
            "1e3",
            "9999999h",
            "s",
            ".",
            "1.",
            ".5s",
            "1.5ns",
            "99999999999999999999999999",
            "1 s",
            "1..2s",
            "+1s",
            "340282366920938463463374607431768211456",
        ] {
            let error = time(text).unwrap_err();
            assert!(error.contains(text), "{text}: {error}");
        }
    }

    #[test]
    fn ex16_limits_out_of_range_are_refused_with_the_value() {
        for text in [
            "-1",
            "0",
            "0M",
            "nan",
            "inf",
            "None",
            "2G",
            "1.5",
            "18446744073709551616",
            "1X",
            "",
        ] {
            let error = output_limit(text).unwrap_err();
            assert!(error.contains(text), "{text}: {error}");
        }
    }

    #[test]
    fn cl01_machine_flags_out_of_range_are_refused_with_the_value() {
        for text in ["0", "1M", "-4", "1", "100M1", "2000T", "4097"] {
            memory(text).unwrap_err();
        }
        for text in ["0", "33", "-1", "1.0", "", "256"] {
            assert!(cpus(text).unwrap_err().contains(text));
        }
        assert!(cmdline("a\nb").unwrap_err().contains("0x0a"));
        cmdline(&"x".repeat(4000)).unwrap_err();
        folder("").unwrap_err();
    }

    #[test]
    fn cl01_users_are_numbers() {
        assert_eq!(
            user("5"),
            Ok(User {
                uid: 5,
                gid: 5,
                groups: vec![]
            })
        );
        assert_eq!(
            user("5:6"),
            Ok(User {
                uid: 5,
                gid: 6,
                groups: vec![]
            })
        );
        for text in [
            "",
            ":",
            "5:",
            ":5",
            "root",
            "-1",
            "+1",
            "4294967295",
            "1:4294967296",
            "1:2:3",
        ] {
            assert!(user(text).unwrap_err().contains(text));
        }
    }
}
