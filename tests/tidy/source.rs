//! A Rust source, split for the rules: code without comments and strings, and the prose in both.

/// A file of the repository.
pub struct Source {
    /// Path from the repository's root.
    pub path: String,
    /// The file as it is.
    pub text: String,
    /// The same, with comments and the insides of strings blanked: lines and columns stay.
    pub code: String,
    /// Comments and string literals that read as prose: line, from 1, and text.
    pub prose: Vec<(usize, String)>,
}

impl Source {
    /// Reads a Rust source.
    pub fn of_rust(path: &str, text: &str) -> Source {
        let (code, prose) = separate(text);
        Source { path: path.into(), text: text.into(), code, prose }
    }

    /// Reads a file in which everything is prose, such as a document or a shell script.
    pub fn of_text(path: &str, text: &str) -> Source {
        let lines = text.lines().enumerate();
        let prose = lines.map(|(index, line)| (index + 1, line.to_owned())).collect();
        Source { path: path.into(), text: text.into(), code: String::new(), prose }
    }

    /// The code above the file's inline tests; nothing for a file of tests.
    pub fn production(&self) -> &str {
        let is_test = self.path.ends_with("tests.rs") || !self.path.starts_with("src/");
        // Only tests that stand in the file; `mod tests;` is a file of its own.
        let marks = self.code.match_indices("#[cfg(test)]\n");
        let mut inline = marks.filter(|(at, mark)| {
            let line = self.code[at + mark.len()..].lines().next().unwrap_or_default();
            line.contains("mod ") && line.trim_end().ends_with('{')
        });
        let end = inline.next().map_or(self.code.len(), |(at, _)| at);
        if is_test { "" } else { &self.code[..end] }
    }

    /// The module's path inside the crate: `src/a/mod.rs` and `src/a.rs` are `a`.
    pub fn module(&self) -> Option<String> {
        let path = self.path.strip_prefix("src/")?.strip_suffix(".rs")?;
        let path = path.strip_suffix("/mod").unwrap_or(path);
        Some(if path == "lib" { String::new() } else { path.replace('/', "::") })
    }
}

/// Splits a source into code and prose. A string counts as prose if it has a space in it.
fn separate(text: &str) -> (String, Vec<(usize, String)>) {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut prose = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let rest = &text[at..];
        let (len, inside) = if rest.starts_with("//") {
            (rest.find('\n').unwrap_or(rest.len()), true)
        } else if rest.starts_with("/*") {
            (rest.find("*/").map_or(rest.len(), |end| end + 2), true)
        } else if let Some(len) = raw_string(text, at) {
            (len, true)
        } else if bytes[at] == b'"' {
            (string(rest), true)
        } else if bytes[at] == b'\'' {
            (character(rest), true)
        } else {
            (rest.chars().next().map_or(1, char::len_utf8), false)
        };
        if inside {
            let piece = &rest[..len];
            for (index, part) in piece.lines().enumerate() {
                if piece.starts_with('/') || part.contains(' ') {
                    prose.push((line + index, part.to_owned()));
                }
            }
            for byte in &mut code[at..at + len] {
                if *byte != b'\n' {
                    *byte = b' ';
                }
            }
        }
        line += rest[..len].matches('\n').count();
        at += len;
    }
    (String::from_utf8(code).expect("whole characters were blanked"), prose)
}

/// The length of the raw string that begins at `at`, if one does.
fn raw_string(text: &str, at: usize) -> Option<usize> {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let rest = &text[at..];
    if at > 0 && is_word(text.as_bytes()[at - 1]) && !text[..at].ends_with('b') {
        return None;
    }
    let hashes = rest.strip_prefix('r')?.bytes().take_while(|&byte| byte == b'#').count();
    let body = rest[1 + hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    let inside = body.find(&end)?;
    Some(1 + hashes + 1 + inside + end.len())
}

/// The length of the string literal that `rest` begins with.
fn string(rest: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in rest.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// The length of the character literal that `rest` begins with; 1 for a lifetime's quote.
fn character(rest: &str) -> usize {
    let mut chars = rest.char_indices().skip(1);
    match chars.next() {
        Some((_, '\\')) => rest[2..].find('\'').map_or(1, |end| end.max(1) + 3),
        Some((at, c)) if rest[at + c.len_utf8()..].starts_with('\'') => at + c.len_utf8() + 1,
        _ => 1,
    }
}

#[test]
fn strings_comments_and_characters_are_told_from_code() {
    let text = "fn a<'x>() { b('\"', \"// no comment\", r#\"use \"q\"\"#); } // who\n";
    let source = Source::of_rust("src/a.rs", text);
    assert_eq!(source.code.trim_end(), "fn a< x>() { b(   ,                ,             ); }");
    let prose: Vec<&str> = source.prose.iter().map(|(_, text)| text.as_str()).collect();
    assert_eq!(prose, ["\"// no comment\"", "r#\"use \"q\"\"#", "// who"]);
    assert_eq!(source.code.len(), text.len());
}

#[test]
fn only_tests_that_stand_in_a_file_end_its_production_code() {
    let text =
        "use a;\n#[cfg(test)]\nmod tests;\nuse b;\n#[cfg(test)]\nmod more {\n    use c;\n}\n";
    let source = Source::of_rust("src/a/mod.rs", text);
    assert!(source.production().contains("use b;") && !source.production().contains("use c;"));
}
