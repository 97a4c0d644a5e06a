//! A worker's entry: what is read is written as it can be read again, and nothing else is read.

use baton::cluster::entry::Entry;

pub fn run(data: &[u8]) {
    let Ok(entry) = Entry::parse(data) else { return };
    assert_eq!(Entry::parse(&entry.to_json()), Ok(entry));
}
