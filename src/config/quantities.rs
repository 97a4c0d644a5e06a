//! Numbers that several commands take, checked.

use super::error::ConfigError;

/// That a value is not within its limit.
pub fn value(flag: &'static str, value: impl ToString, limit: String) -> ConfigError {
    ConfigError::Value { flag, value: value.to_string(), limit }
}

/// A number above 0.
///
/// # Errors
/// It is not.
pub fn positive(flag: &'static str, number: f64) -> Result<f64, ConfigError> {
    match number {
        number if number.is_finite() && number > 0.0 => Ok(number),
        number => Err(value(flag, number, "a number above 0".into())),
    }
}

/// The numbers of a polynomial, the last of which may be left away or below 0, as long as no step of up to `most` tokens
/// takes less than no time.
///
/// # Errors
/// They are not.
pub fn coefficients(
    flag: &'static str,
    given: &[f64],
    default: [f64; 4],
    most: u32,
) -> Result<[f64; 4], ConfigError> {
    const FORM: &str =
        "three or four numbers that are finite: A,B,C or A,B,C,D, as --help has them";
    let typed = || given.iter().map(f64::to_string).collect::<Vec<_>>().join(",");
    let numbers = match *given {
        [] => return Ok(default),
        [a, b, c] => [a, b, c, 0.0],
        [a, b, c, d] => [a, b, c, d],
        _ => return Err(value(flag, typed(), FORM.into())),
    };
    if !numbers.iter().all(|number| number.is_finite()) {
        return Err(value(flag, typed(), FORM.into()));
    }
    let [a, b, _, d] = numbers;
    let most = f64::from(most);
    let are_times =
        numbers[..3].iter().all(|&number| number >= 0.0) && a + b * most + d * most * most >= 0.0;
    match are_times {
        true => Ok(numbers),
        false => {
            let limit = format!(
                "a step of up to {most} tokens must not take less than 0 ms, by A, B, C or D"
            );
            Err(value(flag, typed(), limit))
        }
    }
}
