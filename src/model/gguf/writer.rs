//! Builds small GGUF files for tests.

/// A file under construction.
#[derive(Default)]
pub(crate) struct GgufWriter {
    entries: Vec<Vec<u8>>,
    tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

fn text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

impl GgufWriter {
    fn entry(mut self, key: &str, kind: u32, value: impl IntoIterator<Item = u8>) -> GgufWriter {
        let mut entry = Vec::new();
        text(&mut entry, key);
        entry.extend(kind.to_le_bytes());
        entry.extend(value);
        self.entries.push(entry);
        self
    }

    fn list(self, key: &str, kind: u32, count: usize, values: Vec<u8>) -> GgufWriter {
        let mut list = kind.to_le_bytes().to_vec();
        list.extend((count as u64).to_le_bytes());
        list.extend(values);
        self.entry(key, 9, list)
    }

    pub(crate) fn u32(self, key: &str, value: u32) -> GgufWriter {
        self.entry(key, 4, value.to_le_bytes())
    }

    pub(crate) fn i32(self, key: &str, value: i32) -> GgufWriter {
        self.entry(key, 5, value.to_le_bytes())
    }

    pub(crate) fn f32(self, key: &str, value: f32) -> GgufWriter {
        self.entry(key, 6, value.to_le_bytes())
    }

    pub(crate) fn bool(self, key: &str, value: bool) -> GgufWriter {
        self.entry(key, 7, [value.into()])
    }

    pub(crate) fn string(self, key: &str, value: &str) -> GgufWriter {
        let mut bytes = Vec::new();
        text(&mut bytes, value);
        self.entry(key, 8, bytes)
    }

    pub(crate) fn strings(self, key: &str, values: &[&str]) -> GgufWriter {
        let mut bytes = Vec::new();
        values.iter().for_each(|value| text(&mut bytes, value));
        self.list(key, 8, values.len(), bytes)
    }

    pub(crate) fn i32s(self, key: &str, values: &[i32]) -> GgufWriter {
        self.list(key, 5, values.len(), values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    pub(crate) fn f32s(self, key: &str, values: &[f32]) -> GgufWriter {
        self.list(key, 6, values.len(), values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// `shape` is fastest first, `kind` is ggml's number.
    pub(crate) fn tensor(
        mut self,
        name: &str,
        shape: &[u64],
        kind: u32,
        data: &[u8],
    ) -> GgufWriter {
        self.tensors.push((name.to_owned(), shape.to_vec(), kind, data.to_vec()));
        self
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.entries.len() as u64).to_le_bytes());
        bytes.extend(self.entries.concat());
        let mut data = Vec::new();
        for (name, shape, kind, values) in &self.tensors {
            data.resize(data.len().next_multiple_of(32), 0);
            text(&mut bytes, name);
            bytes.extend((shape.len() as u32).to_le_bytes());
            shape.iter().for_each(|n| bytes.extend(n.to_le_bytes()));
            bytes.extend(kind.to_le_bytes());
            bytes.extend((data.len() as u64).to_le_bytes());
            data.extend(values);
        }
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(data);
        bytes
    }
}
