//! The address of a registry: routers, or etcd.

use crate::config::values::WorkerUrl;
use crate::limits::REGISTRY_HOSTS_MAX;
use serde::{Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// etcd's default port for clients.
const ETCD_PORT: u16 = 2379;

/// The value of `--registry`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RegistryAddress {
    /// Routers, each with its own registry: `[http[s]://]HOST:PORT[,[http[s]://]HOST:PORT]`.
    Routers(Vec<WorkerUrl>),
    /// Members of one etcd: `etcd://HOST[:PORT][,HOST[:PORT]]`.
    Etcd(Vec<WorkerUrl>),
}

impl FromStr for RegistryAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<RegistryAddress, String> {
        const FORM: &str = "a registry is [http[s]://]ROUTER:PORT[,[http[s]://]ROUTER:PORT] or \
                            etcd://HOST[:PORT][,HOST[:PORT]]";
        let (hosts, is_etcd) = match text.strip_prefix("etcd://") {
            Some(hosts) => (hosts, true),
            None => (text, false),
        };
        let mut urls: Vec<WorkerUrl> = Vec::new();
        for host in hosts.split(',') {
            // Each router has its own scheme. For etcd one scheme applies to all members.
            let url = match is_etcd {
                true => WorkerUrl::parse(host, ETCD_PORT).ok().filter(|_| !host.contains("://")),
                false => host.parse().ok(),
            };
            let url = url.ok_or(FORM)?;
            if !urls.contains(&url) {
                urls.push(url);
            }
        }
        if urls.len() > REGISTRY_HOSTS_MAX {
            return Err(format!("at most {REGISTRY_HOSTS_MAX} hosts"));
        }
        Ok(if is_etcd { RegistryAddress::Etcd(urls) } else { RegistryAddress::Routers(urls) })
    }
}

impl fmt::Display for RegistryAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (RegistryAddress::Routers(urls) | RegistryAddress::Etcd(urls)) = self;
        let urls: Vec<String> = urls.iter().map(WorkerUrl::to_string).collect();
        match self {
            RegistryAddress::Routers(_) => f.write_str(&urls.join(",")),
            RegistryAddress::Etcd(_) => {
                write!(f, "etcd://{}", urls.join(",").replace("http://", ""))
            }
        }
    }
}

impl Serialize for RegistryAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routers_may_have_a_scheme_each_and_etcd_has_one_for_all() {
        for text in [
            "http://a:1",
            "http://a:1,https://[fd00::1]:2",
            "etcd://a:2379",
            "etcd://a:1,10.0.0.1:2",
        ] {
            assert_eq!(
                text.parse::<RegistryAddress>().map(|found| found.to_string()).as_deref(),
                Ok(text)
            );
        }
        for text in ["a:1,b:2", "http://a:1,b:2", "a:1,http://b:2,a:1"] {
            let found = text.parse::<RegistryAddress>().map(|found| found.to_string());
            assert_eq!(found.as_deref(), Ok("http://a:1,http://b:2"), "{text}");
        }
        let etcd =
            "etcd://a,[fd00::1],b:1".parse::<RegistryAddress>().map(|found| found.to_string());
        assert_eq!(etcd.as_deref(), Ok("etcd://a:2379,[fd00::1]:2379,b:1"));
        for text in [
            "",
            "http://a:1,etcd://b:2",
            "a:1,",
            "etcd://a:1,etcd://b:2",
            "etcd://http://a:1",
            "etcd://https://a:1",
            "etcd://",
            "etcd://a:0",
        ] {
            assert!(text.parse::<RegistryAddress>().is_err(), "{text}");
        }
    }
}
