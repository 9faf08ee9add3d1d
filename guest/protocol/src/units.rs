//! Sizes and times as people write them. EX16: what makes no sense is refused before anything is
//! sent.

use crate::limits::{MAX_OUTPUT_LIMIT, MAX_TIMEOUT_NS};

/// Why a size or a time was refused; the value is named.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// It is no number with a unit.
    #[error("{value:?} is not {what}; write a number with a unit, like {example}")]
    Syntax {
        /// What was given.
        value: String,
        /// What it should have been.
        what: &'static str,
        /// An example.
        example: &'static str,
    },
    /// It is nothing.
    #[error("{value:?} is zero; {instead}")]
    Zero {
        /// What was given.
        value: String,
        /// What to write instead.
        instead: &'static str,
    },
    /// It is too much.
    #[error("{value:?} is too large; at most {most}")]
    TooLarge {
        /// What was given.
        value: String,
        /// What may be given.
        most: &'static str,
    },
    /// It is finer than can be counted.
    #[error("{value:?} is not a whole number of {unit}")]
    TooFine {
        /// What was given.
        value: String,
        /// The smallest unit.
        unit: &'static str,
    },
}

/// A timeout in nanoseconds: `10s`, `1.5m`, `250ms`; a bare number is seconds.
///
/// ```
/// use vmm_protocol::units::timeout;
///
/// assert_eq!(timeout("1.5s"), Ok(1_500_000_000));
/// assert_eq!(timeout("2"), Ok(2_000_000_000));
/// assert!(timeout("NaN").is_err() && timeout("-1s").is_err() && timeout("0").is_err());
/// ```
pub fn timeout(text: &str) -> Result<u64, UnitError> {
    let nanoseconds = duration(text)?;
    if nanoseconds == 0 {
        return Err(UnitError::Zero {
            value: text.to_owned(),
            instead: "leave it out for no timeout",
        });
    }
    Ok(nanoseconds)
}

/// A time in nanoseconds, zero allowed: `10s`, `1.5m`, `250ms`; a bare number is seconds.
pub fn duration(text: &str) -> Result<u64, UnitError> {
    let syntax = || UnitError::Syntax {
        value: text.to_owned(),
        what: "a time",
        example: "10s",
    };
    let (number, unit) = split(text).ok_or_else(syntax)?;
    let scale = match unit {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "" | "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        "d" => 86_400_000_000_000,
        _ => return Err(syntax()),
    };
    match scaled(number, scale) {
        Scaled::Value(value) if value <= MAX_TIMEOUT_NS => Ok(value),
        Scaled::Value(_) | Scaled::Overflow => Err(UnitError::TooLarge {
            value: text.to_owned(),
            most: "366d",
        }),
        Scaled::Fraction => Err(UnitError::TooFine {
            value: text.to_owned(),
            unit: "nanoseconds",
        }),
        Scaled::Malformed => Err(syntax()),
    }
}

/// A size in bytes: `1M`, `64K`, `1.5G`, `2GiB`; units are powers of 1024 and a bare number is
/// bytes.
///
/// ```
/// use vmm_protocol::units::size;
///
/// assert_eq!(size("1.5K"), Ok(1536));
/// assert_eq!(size("256MiB"), Ok(256 << 20));
/// assert!(size("inf").is_err());
/// ```
pub fn size(text: &str) -> Result<u64, UnitError> {
    let syntax = || UnitError::Syntax {
        value: text.to_owned(),
        what: "a size",
        example: "1M",
    };
    let (number, unit) = split(text).ok_or_else(syntax)?;
    let scale = match unit {
        "" | "B" | "b" => 1,
        "K" | "k" | "KB" | "kB" | "KiB" => 1 << 10,
        "M" | "m" | "MB" | "MiB" => 1 << 20,
        "G" | "g" | "GB" | "GiB" => 1 << 30,
        "T" | "t" | "TB" | "TiB" => 1 << 40,
        _ => return Err(syntax()),
    };
    match scaled(number, scale) {
        Scaled::Value(value) => Ok(value),
        Scaled::Overflow => Err(UnitError::TooLarge {
            value: text.to_owned(),
            most: "16777215T",
        }),
        Scaled::Fraction => Err(UnitError::TooFine {
            value: text.to_owned(),
            unit: "bytes",
        }),
        Scaled::Malformed => Err(syntax()),
    }
}

/// An output limit: a size, or `none`.
///
/// ```
/// use vmm_protocol::units::output_limit;
///
/// assert_eq!(output_limit("1M"), Ok(Some(1 << 20)));
/// assert_eq!(output_limit("none"), Ok(None));
/// assert!(output_limit("0").is_err());
/// ```
pub fn output_limit(text: &str) -> Result<Option<u64>, UnitError> {
    if text == "none" {
        return Ok(None);
    }
    match size(text)? {
        0 => Err(UnitError::Zero {
            value: text.to_owned(),
            instead: "a limit is one byte or more, or none",
        }),
        limit if limit > MAX_OUTPUT_LIMIT => Err(UnitError::TooLarge {
            value: text.to_owned(),
            most: "1G, or none",
        }),
        limit => Ok(Some(limit)),
    }
}

/// A number and what follows it. Signs, exponents and names of no number are no number.
fn split(text: &str) -> Option<(&str, &str)> {
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    (end > 0).then(|| text.split_at(end))
}

enum Scaled {
    Value(u64),
    Overflow,
    Fraction,
    Malformed,
}

/// `number * scale` without rounding.
fn scaled(number: &str, scale: u64) -> Scaled {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || fraction.is_empty() || fraction.contains('.') {
        return Scaled::Malformed;
    }
    let fraction = fraction.trim_end_matches('0');
    // More digits than a u64 counts cannot be a whole number of any unit here.
    let (numerator, denominator) = match fraction {
        "" => (0, 1),
        digits => match (
            digits.parse::<u64>(),
            10_u128.checked_pow(digits.len() as u32),
        ) {
            (Ok(numerator), Some(denominator)) => (u128::from(numerator), denominator),
            _ => return Scaled::Fraction,
        },
    };
    let Ok(whole) = whole.parse::<u64>() else {
        return Scaled::Overflow;
    };
    let part = numerator * u128::from(scale);
    if part % denominator != 0 {
        return Scaled::Fraction;
    }
    match u64::try_from(u128::from(whole) * u128::from(scale) + part / denominator) {
        Ok(value) => Scaled::Value(value),
        Err(_) => Scaled::Overflow,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONSENSE: [&str; 16] = [
        "", " ", "-1", "-1s", "+1", "NaN", "nan", "inf", "infinity", "1e9", "1 s", "s", ".", "1.",
        ".5", "1.2.3",
    ];

    #[test]
    fn ex16_nonsense_is_refused_and_named() {
        for text in NONSENSE {
            for error in [
                timeout(text).unwrap_err(),
                size(text).unwrap_err(),
                output_limit(text).unwrap_err(),
            ] {
                assert!(
                    error.to_string().starts_with(&format!("{text:?}")),
                    "{error}"
                );
            }
        }
        assert!(timeout("1x").is_err() && size("1s").is_err() && timeout("1K").is_err());
    }

    #[test]
    fn ex16_zero_is_refused_where_it_means_nothing() {
        for text in ["0", "0s", "0.0", "000ms"] {
            assert!(
                matches!(timeout(text), Err(UnitError::Zero { .. })),
                "{text}"
            );
        }
        assert!(matches!(output_limit("0K"), Err(UnitError::Zero { .. })));
        assert_eq!((size("0"), duration("0")), (Ok(0), Ok(0)));
    }

    #[test]
    fn ex16_over_large_is_refused() {
        for text in [
            "367d",
            "99999999999999999999",
            "18446744073709551615h",
            "1000000000000h",
        ] {
            assert!(
                matches!(timeout(text), Err(UnitError::TooLarge { .. })),
                "{text}"
            );
        }
        for text in ["1025M", "2G", "16777216T", "18446744073709551616"] {
            assert!(
                matches!(output_limit(text), Err(UnitError::TooLarge { .. })),
                "{text}"
            );
        }
        assert_eq!(output_limit("1G"), Ok(Some(1 << 30)));
        assert_eq!(timeout("366d"), Ok(MAX_TIMEOUT_NS));
    }

    #[test]
    fn ex16_fractions_are_exact_or_refused() {
        assert_eq!(timeout("0.000000001s"), Ok(1));
        assert_eq!(
            timeout("2.5000000000000000000000000000000000000000"),
            Ok(2_500_000_000)
        );
        assert_eq!(size("0.5T"), Ok(1 << 39));
        for text in [
            "0.1ns",
            "0.0000000001",
            "1.0000000000000000000000000000000000000001h",
        ] {
            assert!(
                matches!(timeout(text), Err(UnitError::TooFine { .. })),
                "{text}"
            );
        }
        assert!(matches!(size("0.3K"), Err(UnitError::TooFine { .. })));
    }
}
