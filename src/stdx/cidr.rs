//! Networks in CIDR form.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// A network in CIDR form. An address without a prefix is a network of one address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cidr {
    address: IpAddr,
    prefix: u8,
}

impl Cidr {
    /// The loopback networks.
    pub const LOOPBACK: [Cidr; 2] = [
        Cidr { address: IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 0)), prefix: 8 },
        Cidr { address: IpAddr::V6(std::net::Ipv6Addr::LOCALHOST), prefix: 128 },
    ];

    /// Whether all of `other` lies in it.
    pub fn covers(&self, other: &Cidr) -> bool {
        let is_same_kind = self.address.is_ipv4() == other.address.is_ipv4();
        is_same_kind && self.prefix <= other.prefix && self.contains(other.address)
    }

    /// Whether `address` lies in it. An IPv4 address mapped into IPv6 counts as the IPv4 address.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(network), IpAddr::V4(host)) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.prefix)).unwrap_or(0);
                network.to_bits() & mask == host.to_bits() & mask
            }
            (IpAddr::V6(network), IpAddr::V6(host)) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.prefix)).unwrap_or(0);
                network.to_bits() & mask == host.to_bits() & mask
            }
            _ => false,
        }
    }
}

impl From<IpAddr> for Cidr {
    fn from(address: IpAddr) -> Cidr {
        Cidr { address, prefix: if address.is_ipv4() { 32 } else { 128 } }
    }
}

impl FromStr for Cidr {
    type Err = String;

    fn from_str(text: &str) -> Result<Cidr, String> {
        let (address, prefix) = text.split_once('/').map_or((text, None), |(a, p)| (a, Some(p)));
        let address: IpAddr = address
            .parse()
            .map_err(|_| "a network is an address and a prefix, such as 10.0.0.0/8")?;
        let bits: u8 = if address.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            None => bits,
            Some(prefix) => prefix
                .parse()
                .ok()
                .filter(|&prefix| prefix <= bits)
                .ok_or_else(|| format!("the prefix of this address has 0 to {bits} bits"))?,
        };
        Ok(Cidr { address, prefix })
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

#[cfg(feature = "serve")]
impl serde::Serialize for Cidr {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks() {
        let contains = |network: &str, host: &str| {
            network.parse::<Cidr>().unwrap().contains(host.parse::<IpAddr>().unwrap())
        };
        assert!(contains("10.0.0.0/8", "10.255.0.1"));
        assert!(!contains("10.0.0.0/8", "11.0.0.1"));
        assert!(contains("10.1.2.3", "10.1.2.3"));
        assert!(!contains("10.1.2.3", "10.1.2.4"));
        assert!(contains("0.0.0.0/0", "8.8.8.8"));
        assert!(contains("fd00::/8", "fd12::1"));
        assert!(!contains("::/0", "10.0.0.1"));
        assert!(contains("10.0.0.0/8", "::ffff:10.0.0.1"));
        let covers = |network: &str, other: &str| {
            network.parse::<Cidr>().unwrap().covers(&other.parse::<Cidr>().unwrap())
        };
        assert!(covers("127.0.0.0/8", "127.0.0.1") && covers("10.0.0.0/8", "10.1.0.0/16"));
        assert!(!covers("127.0.0.0/8", "126.0.0.0/7") && !covers("127.0.0.0/8", "0.0.0.0/0"));
        assert!(!covers("0.0.0.0/0", "::1") && !covers("::/0", "10.0.0.1"));
        for text in ["", "10.0.0.0/33", "::/129", "10.0.0/8", "10.0.0.0/", "10.0.0.0/-1", "host/8"]
        {
            assert!(text.parse::<Cidr>().is_err(), "{text}");
        }
        assert_eq!("10.1.0.0/16".parse::<Cidr>().unwrap().to_string(), "10.1.0.0/16");
    }
}
