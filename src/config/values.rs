//! Types and parsers of single flag values: sizes, hosts, networks, CPU lists, worker addresses.

use crate::limits::PEER_TIMEOUT_RANGE;
use crate::sys::affinity::CPUS_MAX;
use serde::{Serialize, Serializer};
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

/// A number of bytes: `2GiB`, `512MiB`, `1.5G`, or a number without a unit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
pub struct ByteSize(pub u64);

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<ByteSize, String> {
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ => return Err("a size is a number and a unit, such as 2GiB or 512MiB".into()),
        };
        let bytes = match number.split_once('.') {
            None => number.parse::<u64>().ok().and_then(|whole| whole.checked_mul(scale)),
            // An f64 has 53 bits, which are enough for every size in use.
            Some(_) => number
                .parse::<f64>()
                .ok()
                .map(|parts| parts * scale as f64)
                .map(|bytes| bytes as u64),
        };
        bytes
            .map(ByteSize)
            .ok_or_else(|| "a size is a number and a unit, such as 2GiB or 512MiB".into())
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, shift) in [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)] {
            if self.0 >= 1 << shift && self.0.is_multiple_of(1 << shift) {
                return write!(f, "{}{unit}", self.0 >> shift);
            }
        }
        write!(f, "{} bytes", self.0)
    }
}

/// Parses an address to listen on: an IP address or `localhost`. Names are not resolved.
///
/// # Errors
/// Any other text.
pub fn parse_host(text: &str) -> Result<IpAddr, String> {
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    match bare {
        "localhost" => Ok(IpAddr::from([127, 0, 0, 1])),
        _ => bare.parse().map_err(|_| "a host to listen on is an IP address or localhost".into()),
    }
}

/// Parses a host that peers connect to: a name or an address, without scheme and port.
///
/// # Errors
/// Any other text, and 0.0.0.0 or ::.
pub fn parse_advertised(text: &str) -> Result<String, String> {
    let address = parse_host(text);
    if address.as_ref().is_ok_and(IpAddr::is_unspecified) {
        return Err("peers cannot connect to it; give an address that they can reach".into());
    }
    let name_byte = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    if address.is_ok() || (!text.is_empty() && text.len() <= 253 && text.bytes().all(name_byte)) {
        Ok(text.to_owned())
    } else {
        Err("a host name or an address, without scheme and port".into())
    }
}

/// Parses a peer's address: a name or an IP address, and a port.
///
/// # Errors
/// Any other text.
pub fn parse_peer(text: &str) -> Result<String, String> {
    let port = text.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    let is_bare = !text.contains('/') && text.parse::<WorkerUrl>().is_ok();
    match port {
        Some(1..) if is_bare => Ok(text.to_owned()),
        _ => Err("a peer is HOST:PORT, such as 10.0.0.2:7000".into()),
    }
}

/// Parses seconds, with an optional fraction.
///
/// # Errors
/// The value is not in [`PEER_TIMEOUT_RANGE`].
pub fn parse_peer_timeout(text: &str) -> Result<Duration, String> {
    let [least, most] = PEER_TIMEOUT_RANGE;
    let seconds = text.parse::<f64>().ok().filter(|seconds| (least..=most).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| format!("{least} to {most} seconds"))
}

/// Parses the path of a health probe. It is sent unchanged.
///
/// # Errors
/// The text is not such a path.
pub fn parse_health_path(text: &str) -> Result<String, String> {
    let is_path =
        text.starts_with('/') && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#');
    if is_path && text.len() <= 256 {
        Ok(text.to_owned())
    } else {
        Err("a path begins with / and has at most 256 visible ASCII characters".into())
    }
}

/// Parses the name of a header, to lower case.
///
/// # Errors
/// The text is not a header name of at most 64 characters.
pub fn parse_header_name(text: &str) -> Result<String, String> {
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if (1..=64).contains(&text.len()) && text.bytes().all(is_name) {
        Ok(text.to_ascii_lowercase())
    } else {
        Err("a header's name has 1 to 64 characters: letters, digits, - and _".into())
    }
}

/// Reads an origin of web pages as browsers send it, or `*`.
///
/// # Errors
/// The text is no origin, such as one with a path.
pub fn parse_origin(text: &str) -> Result<String, String> {
    let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let is_part = |byte: u8| byte.is_ascii_graphic() && !b"/?#@".contains(&byte);
    let is_origin = host.is_some_and(|host| !host.is_empty() && host.bytes().all(is_part));
    if text == "*" || is_origin {
        Ok(text.to_ascii_lowercase())
    } else {
        Err("must be *, or an origin without a path, such as https://chat.example.com".into())
    }
}

/// Logical CPUs in the kernel's format: `0-3,8`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CpuList(pub Vec<usize>);

impl FromStr for CpuList {
    type Err = String;

    fn from_str(text: &str) -> Result<CpuList, String> {
        let number = |text: &str| text.trim().parse().ok().filter(|&cpu: &usize| cpu < CPUS_MAX);
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            match (number(first), number(last)) {
                (Some(first), Some(last)) if first <= last => cpus.extend(first..=last),
                _ => {
                    return Err(format!(
                        "CPUs are numbers and ranges below {CPUS_MAX}, such as 0-3,8"
                    ));
                }
            }
        }
        cpus.sort_unstable();
        cpus.dedup();
        Ok(CpuList(cpus))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, run) in self.0.chunk_by(|a, b| a + 1 == *b).enumerate() {
            let separator = if index == 0 { "" } else { "," };
            match run {
                [only] => write!(f, "{separator}{only}")?,
                _ => write!(f, "{separator}{}-{}", run[0], run[run.len() - 1])?,
            }
        }
        Ok(())
    }
}

/// The HTTP address of a worker or registry: `http[s]://HOST[:PORT]`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct WorkerUrl {
    /// Name or address; an IPv6 address without its brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// Whether the server uses TLS.
    pub tls: bool,
}

impl FromStr for WorkerUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<WorkerUrl, String> {
        WorkerUrl::parse(text, if text.starts_with("https:") { 443 } else { 80 })
    }
}

impl WorkerUrl {
    /// Parses a URL; `port` is the default port.
    ///
    /// # Errors
    /// The text is not such a URL.
    pub fn parse(text: &str, port: u16) -> Result<WorkerUrl, String> {
        const FORM: &str = "an address is http://HOST:PORT or https://HOST:PORT";
        let (tls, rest) = match text.split_once("://") {
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            Some((scheme, _)) => return Err(format!("{FORM}; {scheme} is not supported")),
            None => (false, text),
        };
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => {
                (host, port.parse().ok().filter(|&port| port > 0).ok_or(FORM)?)
            }
            _ => (authority, port),
        };
        let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
        let is_bracketed_v6 =
            bare.len() != host.len() && bare.parse::<std::net::Ipv6Addr>().is_ok();
        if is_bracketed_v6 || (!host.contains(':') && parse_advertised(host).is_ok()) {
            Ok(WorkerUrl { host: bare.to_owned(), port, tls })
        } else {
            Err(FORM.into())
        }
    }

    /// Whether the other URL has the same host and port, with or without TLS.
    pub fn is_place_of(&self, other: &WorkerUrl) -> bool {
        (&self.host, self.port) == (&other.host, other.port)
    }

    /// Host and port, in the form of a request's Host header.
    pub fn authority(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }
}

impl fmt::Display for WorkerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", if self.tls { "https" } else { "http" }, self.authority())
    }
}

impl Serialize for WorkerUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("2GiB", 2 << 30),
            ("2 gib", 2 << 30),
            ("512M", 512 << 20),
            ("1.5G", 3 << 29),
            ("2GB", 2_000_000_000),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for text in
            ["", "GiB", "-1", "2XiB", "1e9", "1.2.3G", "99999999TiB", "18446744073709551616"]
        {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
        assert_eq!(ByteSize(2 << 30).to_string(), "2GiB");
        assert_eq!(ByteSize(1000).to_string(), "1000 bytes");
    }

    #[test]
    fn hosts() {
        assert_eq!(parse_host("localhost"), Ok(IpAddr::from([127, 0, 0, 1])));
        assert_eq!(parse_host("[::1]"), Ok("::1".parse().unwrap()));
        assert!(parse_host("example.org").is_err());
        assert_eq!(parse_advertised("node-1.example.org").as_deref(), Ok("node-1.example.org"));
        for text in ["0.0.0.0", "::", "", "http://a", "a:80", "a b"] {
            assert!(parse_advertised(text).is_err(), "{text}");
        }
    }

    #[test]
    fn peers() {
        for text in ["node-1:7000", "10.0.0.2:1", "[fd00::1]:65535"] {
            assert_eq!(parse_peer(text).as_deref(), Ok(text));
        }
        for text in [
            "",
            "nowhere",
            "a:",
            ":7",
            "a:0",
            "a:65536",
            "a:b",
            "fd00::1:7",
            "[::1]",
            "http://a:1",
            "a b:1",
        ] {
            assert!(parse_peer(text).is_err(), "{text}");
        }
    }

    #[test]
    fn cpu_lists() {
        assert_eq!("8,0-3,2".parse(), Ok(CpuList(vec![0, 1, 2, 3, 8])));
        for text in ["", "3-1", "a", "0-", "0-99999999999", "8192"] {
            assert!(text.parse::<CpuList>().is_err(), "{text}");
        }
    }

    #[test]
    fn worker_urls() {
        for (text, shown) in [
            ("http://10.0.0.1:30000", "http://10.0.0.1:30000"),
            ("http://node-1/", "http://node-1:80"),
            ("node-1:9", "http://node-1:9"),
            ("http://[fd00::1]:7", "http://[fd00::1]:7"),
            ("http://[fd00::1]", "http://[fd00::1]:80"),
            ("https://node-1", "https://node-1:443"),
            ("https://[fd00::1]:7/", "https://[fd00::1]:7"),
        ] {
            assert_eq!(
                text.parse::<WorkerUrl>().map(|url| url.to_string()).as_deref(),
                Ok(shown),
                "{text}"
            );
        }
        for text in [
            "",
            "ftp://a:1",
            "http://a:0",
            "http://a:99999",
            "http://a/v1",
            "http://fd00::1:7",
            "http://u@a:1",
        ] {
            assert!(text.parse::<WorkerUrl>().is_err(), "{text}");
        }
    }
}
