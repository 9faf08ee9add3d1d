//! Names of sandboxes.

use std::fmt;
use std::str::FromStr;

/// Most bytes of a name.
const MAX: usize = 64;

/// A sandbox's name: 1 to 64 letters, digits, `.`, `_` and `-`, beginning with a letter or digit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name(String);

/// A text that is no name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no name of a sandbox: use 1 to {MAX} letters, digits, '.', '_' and '-', the first a letter or digit"
)]
pub struct BadName(String);

impl Name {
    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        let fits = (1..=MAX).contains(&text.len());
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        // No name hides, climbs out of the root, or looks like a flag.
        let starts = text
            .as_bytes()
            .first()
            .is_some_and(u8::is_ascii_alphanumeric);
        if fits && starts && text.bytes().all(allowed) {
            Ok(Self(text.to_owned()))
        } else {
            Err(BadName(text.chars().take(2 * MAX).collect()))
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain() {
        for text in ["a", "box", "A.b_c-1", "9", &"x".repeat(64)] {
            assert_eq!(text.parse::<Name>().unwrap().as_str(), text);
        }
        for text in [
            "",
            ".",
            "..",
            "-a",
            ".a",
            "_a",
            "a/b",
            "a b",
            "ä",
            "a\n",
            &"x".repeat(65),
        ] {
            let error = text.parse::<Name>().unwrap_err();
            assert!(error.to_string().contains("letters, digits"), "{error}");
        }
    }
}
