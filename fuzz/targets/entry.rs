//! A worker's registry entry: if an entry is read, written and read again, both results are equal.

use baton::registry::entry::Entry;

pub fn run(data: &[u8]) {
    let Ok(entry) = Entry::parse(data) else { return };
    assert_eq!(Entry::parse(&entry.to_json()), Ok(entry));
}
