//! Dates of the calendar.

/// Days since 1970-01-01 as a date of the Gregorian calendar. Years start in March, so that the
/// leap day is the last day (H. Hinnant, chrono-compatible low-level date algorithms).
pub fn civil_date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468; // since 0000-03-01
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::civil_date;

    #[test]
    fn dates() {
        for (days, date) in [
            (0, (1970, 1, 1)),
            (58, (1970, 2, 28)),
            (59, (1970, 3, 1)),
            (11_016, (2000, 2, 29)),
            (11_017, (2000, 3, 1)),
            (20_818, (2026, 12, 31)),
            (47_540, (2100, 2, 28)),
            (47_541, (2100, 3, 1)),
        ] {
            assert_eq!(civil_date(days), date, "{days}");
        }
    }
}
