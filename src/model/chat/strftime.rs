//! Formats dates for templates, in UTC and English.

use crate::stdx::date::civil_date;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] =
    ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// Formats `seconds` since 1970 with `format`. The error is the unknown specifier.
pub(super) fn format(seconds: u64, format: &str) -> Result<String, String> {
    let (days, second) = (seconds / 86400, seconds % 86400);
    let (year, month, day) = civil_date(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let month_name = MONTHS[month as usize - 1];
    let day_name = DAYS[(days % 7) as usize];
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut specifier = rest.next();
        let padded = specifier != Some('-');
        if !padded {
            specifier = rest.next();
        }
        let two = |n: u64| if padded { format!("{n:02}") } else { n.to_string() };
        out += &match specifier {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('e') => format!("{day:2}"),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('H') => two(hour),
            Some('I') => two((hour + 11) % 12 + 1),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('%') => "%".to_owned(),
            other => return Err(format!("%{}", other.map_or(String::new(), String::from))),
        };
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::format;

    #[test]
    fn dates_of_note() {
        let date = |seconds| format(seconds, "%A %-d %B %Y %I:%M:%S %p").unwrap();
        assert_eq!(date(0), "Thursday 1 January 1970 12:00:00 AM");
        assert_eq!(date(951_782_400 + 3600 * 13), "Tuesday 29 February 2000 01:00:00 PM");
        assert_eq!(date(4_107_542_399), "Sunday 28 February 2100 11:59:59 PM");
        assert_eq!(format(1_732_190_000, "%d %b %Y").unwrap(), "21 Nov 2024");
        assert_eq!(format(0, "%Q"), Err("%Q".into()));
    }
}
