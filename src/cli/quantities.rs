//! Checks of numeric values that several commands take.

use crate::config::error::ConfigError;

/// The error for a value that exceeds its limit.
pub fn value(flag: &'static str, value: impl ToString, limit: String) -> ConfigError {
    ConfigError::Value { flag, value: value.to_string(), limit }
}

/// Checks that a number is finite and above 0.
///
/// # Errors
/// The number is infinite, not a number, or not above 0.
pub fn positive(flag: &'static str, number: f64) -> Result<f64, ConfigError> {
    match number {
        number if number.is_finite() && number > 0.0 => Ok(number),
        number => Err(value(flag, number, "a number above 0".into())),
    }
}

/// Checks the coefficients A, B, C and D of a cost polynomial. D can be omitted or negative, but
/// no step of up to `most` tokens may take less than 0 ms.
///
/// # Errors
/// The coefficients break one of these rules.
pub fn coefficients(
    flag: &'static str,
    given: &[f64],
    default: [f64; 4],
    most: u32,
) -> Result<[f64; 4], ConfigError> {
    const FORM: &str = "three or four numbers that are finite: A,B,C or A,B,C,D; see --help";
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
                "a step of up to {most} tokens must not take less than 0 ms; check A, B, C and D"
            );
            Err(value(flag, typed(), limit))
        }
    }
}
