//! Requests and answers as lines of JSON. Pure: no I/O, no clock.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::error::Category;
use serde_json::{Map, Value, json};

/// Version of the requests and answers.
const VERSION: u64 = 1;
/// Longest request in bytes, its line feed included.
pub const MAX_LINE: usize = 4096;
/// Longest grace that a stop may ask for.
const MAX_GRACE: Duration = Duration::from_secs(24 * 3600);

/// What is asked of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// How far it is.
    Status,
    /// Its counters.
    Metrics {
        /// Its agent's, too, for which the guest wakes up.
        agent: bool,
    },
    /// End it gracefully within this time, then at once.
    Stop {
        /// The time.
        grace: Duration,
    },
    /// End it at once.
    Kill,
    /// Answer when it has ended, with its record.
    Wait,
}

/// Why a request is not served, by the `code` that programs look at.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It is no request.
    #[error("{0}")]
    BadRequest(String),
    /// It has another version.
    #[error("version {0} is not spoken here: use 1")]
    Version(String),
    /// There is no such operation.
    #[error("there is no operation {0:?}: use status, metrics, stop, kill or wait")]
    UnknownOperation(String),
    /// It has no end.
    #[error("a request has at most {MAX_LINE} bytes")]
    TooLong,
    /// The client was too slow, or said nothing.
    #[error("no request in time")]
    TooSlow,
    /// Too many clients.
    #[error("{0} clients are connected, which is the limit")]
    TooMany(usize),
    /// Someone else's process.
    #[error("uid {0} may not control this sandbox")]
    Peer(u32),
}

impl Refusal {
    /// Its stable name.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::BadRequest(_) => "bad_request",
            Self::Version(_) => "version",
            Self::UnknownOperation(_) => "unknown_operation",
            Self::TooLong => "too_long",
            Self::TooSlow => "too_slow",
            Self::TooMany(_) => "too_many_clients",
            Self::Peer(_) => "not_permitted",
        }
    }
}

/// Reads a request, which comes without its line feed.
///
/// # Errors
/// [`Refusal`]; unknown fields are refused, so that a misspelt one is not taken for its default.
pub fn parse(line: &[u8]) -> Result<Request, Refusal> {
    let bad = |why: String| Refusal::BadRequest(why);
    if line.len() >= MAX_LINE {
        return Err(Refusal::TooLong);
    }
    let Fields(mut fields) =
        serde_json::from_slice(line).map_err(|error| match error.classify() {
            Category::Data => bad(error.to_string()),
            _ => bad(format!("not JSON: {error}")),
        })?;
    match fields.remove("v") {
        Some(version) if version == VERSION => {}
        Some(version) => return Err(Refusal::Version(short(&version))),
        None => return Err(bad("no field \"v\"".to_owned())),
    }
    let operation = match fields.remove("op") {
        Some(Value::String(operation)) => operation,
        Some(other) => return Err(bad(format!("op is {}: use a string", short(&other)))),
        None => return Err(bad("no field \"op\"".to_owned())),
    };
    let request = match operation.as_str() {
        "status" => Request::Status,
        "metrics" => Request::Metrics {
            agent: agent(fields.remove("agent"))?,
        },
        "kill" => Request::Kill,
        "wait" => Request::Wait,
        "stop" => Request::Stop {
            grace: grace(fields.remove("grace_ms"))?,
        },
        _ => {
            return Err(Refusal::UnknownOperation(
                operation.chars().take(32).collect(),
            ));
        }
    };
    match fields.keys().next() {
        None => Ok(request),
        Some(name) => Err(bad(format!(
            "{operation} has no field {:?}",
            name.chars().take(32).collect::<String>()
        ))),
    }
}

/// The fields of an object, each there once: of two, nobody could say which was meant.
struct Fields(BTreeMap<String, Value>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
        let mut fields = BTreeMap::new();
        while let Some((name, value)) = map.next_entry::<String, Value>()? {
            if fields.contains_key(&name) {
                let name: String = name.chars().take(32).collect();
                return Err(A::Error::custom(format!("two fields {name:?}")));
            }
            fields.insert(name, value);
        }
        Ok(Fields(fields))
    }
}

fn agent(value: Option<Value>) -> Result<bool, Refusal> {
    match value {
        None => Ok(true),
        Some(Value::Bool(agent)) => Ok(agent),
        Some(other) => Err(Refusal::BadRequest(format!(
            "agent is {}: use true or false",
            short(&other)
        ))),
    }
}

fn grace(value: Option<Value>) -> Result<Duration, Refusal> {
    match value {
        None => Ok(Duration::from_secs(10)),
        Some(value) => value
            .as_u64()
            .map(Duration::from_millis)
            .filter(|grace| *grace <= MAX_GRACE)
            .ok_or_else(|| {
                let most = MAX_GRACE.as_millis();
                Refusal::BadRequest(format!("grace_ms is {}: use 0 to {most}", short(&value)))
            }),
    }
}

/// A value for a message, cut.
fn short(value: &Value) -> String {
    value.to_string().chars().take(32).collect()
}

impl Request {
    /// The request as a line.
    #[must_use]
    pub fn line(&self) -> Vec<u8> {
        let mut fields = Map::new();
        let operation = match self {
            Self::Status => "status",
            Self::Metrics { agent } => {
                if !agent {
                    fields.insert("agent".to_owned(), false.into());
                }
                "metrics"
            }
            Self::Kill => "kill",
            Self::Wait => "wait",
            Self::Stop { grace } => {
                let millis = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
                fields.insert("grace_ms".to_owned(), millis.into());
                "stop"
            }
        };
        fields.insert("op".to_owned(), operation.into());
        fields.insert("v".to_owned(), VERSION.into());
        line(&Value::Object(fields))
    }
}

/// An answer that all went well, as a line.
#[must_use]
pub fn answer(result: &Value) -> Vec<u8> {
    line(&json!({"v": VERSION, "ok": true, "result": result}))
}

/// An answer that it did not, as a line.
#[must_use]
pub fn refuse(refusal: &Refusal) -> Vec<u8> {
    line(&json!({
        "v": VERSION, "ok": false,
        "error": {"code": refusal.code(), "message": refusal.to_string()},
    }))
}

fn line(value: &Value) -> Vec<u8> {
    let mut line = value.to_string().into_bytes();
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn requests_survive_the_way() {
        let stop = Request::Stop {
            grace: Duration::from_millis(1500),
        };
        for request in [
            Request::Status,
            Request::Metrics { agent: true },
            Request::Metrics { agent: false },
            Request::Kill,
            Request::Wait,
            stop,
        ] {
            let line = request.line();
            assert_eq!(parse(line.strip_suffix(b"\n").unwrap()), Ok(request));
        }
        let default = Request::Stop {
            grace: Duration::from_secs(10),
        };
        assert_eq!(parse(br#"{"v":1,"op":"stop"}"#), Ok(default));
    }

    #[test]
    fn ho03_wrong_requests_are_refused_by_their_kind_with_the_value() {
        for (line, code, word) in [
            (&b""[..], "bad_request", "JSON"),
            (b"stop", "bad_request", "JSON"),
            (b"[]", "bad_request", "object"),
            (b"{}", "bad_request", "\"v\""),
            (br#"{"v":1}"#, "bad_request", "\"op\""),
            (br#"{"v":2,"op":"kill"}"#, "version", "2"),
            (br#"{"v":"1","op":"kill"}"#, "version", "\"1\""),
            (br#"{"v":1,"op":7}"#, "bad_request", "7"),
            (br#"{"v":1,"op":"explode"}"#, "unknown_operation", "explode"),
            (
                br#"{"v":1,"op":"kill","grace_ms":1}"#,
                "bad_request",
                "grace_ms",
            ),
            (br#"{"v":1,"op":"stop","grace":1}"#, "bad_request", "grace"),
            (
                br#"{"v":1,"op":"metrics","agent":0}"#,
                "bad_request",
                "agent is 0",
            ),
            (
                br#"{"v":1,"op":"status","agent":false}"#,
                "bad_request",
                "agent",
            ),
            (br#"{"v":1,"op":"stop","grace_ms":-1}"#, "bad_request", "-1"),
            (
                br#"{"v":1,"op":"stop","grace_ms":86400001}"#,
                "bad_request",
                "86400001",
            ),
            (
                br#"{"v":1,"op":"stop","grace_ms":18446744073709551615}"#,
                "bad_request",
                "1844",
            ),
            (
                br#"{"v":1,"op":"status","op":"kill"}"#,
                "bad_request",
                "two fields \"op\"",
            ),
            (&[0xff, 0xfe], "bad_request", "JSON"),
        ] {
            let refusal = parse(line).unwrap_err();
            assert_eq!(refusal.code(), code, "{refusal}");
            assert!(refusal.to_string().contains(word), "{refusal}");
        }
        assert_eq!(parse(&[b' '; MAX_LINE]), Err(Refusal::TooLong));
        let most = [
            br#"{"v":1,"op":"kill"}"#.to_vec(),
            vec![b' '; MAX_LINE - 20],
        ]
        .concat();
        assert_eq!(
            (most.len(), parse(&most)),
            (MAX_LINE - 1, Ok(Request::Kill))
        );
    }

    proptest! {
        #[test]
        fn no_line_panics_and_every_refusal_is_short(line in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Err(refusal) = parse(&line) {
                prop_assert!(refuse(&refusal).len() < 600);
            }
        }
    }
}
