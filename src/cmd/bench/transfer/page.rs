//! `--report`: one HTML page without other files. It shows bandwidth over size, the distribution of
//! times, and the bare limits.

use super::report::{Figures, OF_WAKE_UPS};
use hdrhistogram::Histogram;
use std::fmt::Write;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 300.0;
/// Room for the axes' labels.
const LEFT: f64 = 70.0;
const BOTTOM: f64 = 40.0;
const TOP: f64 = 12.0;
/// One colour for each transport and layout; they also differ in brightness.
const COLOURS: [&str; 4] = ["#0060a8", "#c04a00", "#2e7d32", "#7b1fa2"];

const HEAD: &str = "<!doctype html>
<html lang=\"en\"><head><meta charset=\"utf-8\"><title>baton bench transfer</title>
<meta name=\"viewport\" content=\"width=device-width\">
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; \
color: #222; background: #fff }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .2em .7em; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child, td:nth-child(2), th:nth-child(2), td:nth-child(3), th:nth-child(3) \
{ text-align: left }
svg { max-width: 100%; height: auto } text { font: 12px system-ui, sans-serif; fill: #444 }
.scroll { overflow-x: auto } figure { margin: 1.5em 0 } figcaption { color: #555 }
</style></head><body>
<h1>baton bench transfer</h1>
";

/// Writes the page for these rows.
pub fn page(rows: &[Figures]) -> String {
    let mut page = String::from(HEAD);
    let _ = writeln!(
        page,
        "<p>Hand-offs of KV between two processes, and the bare limit of the same bytes in the \
         same run (dashed). The time runs from the source's call to the completion seen at the \
         destination. The first hand-off of each row was compared byte for byte. \
         baton {}, {} {}.</p>",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::OS,
        std::env::consts::ARCH
    );
    page.push_str("<h2>Bandwidth over size</h2>\n");
    bandwidth(&mut page, rows);
    page.push_str("<h2>Figures</h2>\n<div class=\"scroll\">\n");
    table(&mut page, rows);
    page.push_str("</div>\n<h2>Distribution of times</h2>\n");
    for figures in rows {
        spread(&mut page, figures);
    }
    page.push_str("</body></html>\n");
    page
}

fn table(page: &mut String, rows: &[Figures]) {
    page.push_str(
        "<table><tr><th>case<th>layout<th>tp<th>via<th>lanes<th>bytes<th>runs<th>p50 µs\
         <th>p99 µs<th>GB/s<th>work requests<th>doorbells<th>limit<th>limit µs<th>ratio</tr>\n",
    );
    for figures in rows {
        let row = &figures.row;
        let _ = writeln!(
            page,
            "<tr><td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{:.1}<td>{:.1}<td>{:.2}<td>{:.0}\
             <td>{:.0}<td>{}<td>{:.1}<td>{:.2}</tr>",
            escaped(&row.case.name),
            row.layouts.name(),
            row.ranks(),
            escaped(&row.transport),
            row.lanes,
            row.moved().bytes(),
            figures.samples.handed_over.len(),
            figures.p50(),
            figures.p99(),
            figures.gb_per_s(),
            figures.work_requests,
            figures.doorbells,
            escaped(&figures.limit),
            figures.limit_p50(),
            figures.ratio(),
        );
    }
    page.push_str("</table>\n");
    if rows.iter().any(Figures::tells_wake_ups) {
        let _ = writeln!(page, "<p>{OF_WAKE_UPS}</p>");
    }
}

/// The points of one transport and layout.
struct Series<'a> {
    name: String,
    rows: Vec<&'a Figures>,
}

fn series(rows: &[Figures]) -> Vec<Series<'_>> {
    let mut all: Vec<Series> = Vec::new();
    for figures in rows {
        let name = format!("{} {}", figures.row.transport, figures.row.layouts.name());
        match all.iter_mut().find(|series| series.name == name) {
            Some(series) => series.rows.push(figures),
            None => all.push(Series { name, rows: vec![figures] }),
        }
    }
    for series in &mut all {
        series.rows.sort_by_key(|figures| figures.row.moved().bytes());
    }
    all
}

fn bandwidth(page: &mut String, rows: &[Figures]) {
    let bytes = |figures: &Figures| figures.row.moved().bytes() as f64;
    let x = Axis::logarithmic(rows.iter().map(bytes));
    let limit = |figures: &Figures| bytes(figures) / figures.limit_p50() / 1e3;
    let y = Axis::from_zero(rows.iter().flat_map(|figures| [figures.gb_per_s(), limit(figures)]));
    let mut chart = Chart::new(x, y, "bytes handed over", "GB/s at the median");
    for (index, series) in series(rows).iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let points = |value: &dyn Fn(&Figures) -> f64| -> Vec<(f64, f64)> {
            series.rows.iter().map(|figures| (bytes(figures), value(figures))).collect()
        };
        chart.line(&points(&Figures::gb_per_s), colour, false);
        chart.line(&points(&limit), colour, true);
        chart.legend(index, &series.name, colour);
    }
    chart.finish(page, "");
}

fn spread(page: &mut String, figures: &Figures) {
    let samples = &figures.samples;
    let value = |histogram: &Histogram<u64>, percent: u32| {
        histogram.value_at_quantile(f64::from(percent) / 100.0) as f64 / 1e3
    };
    let points = |histogram: &Histogram<u64>| -> Vec<(f64, f64)> {
        (0..=100).map(|percent| (f64::from(percent), value(histogram, percent))).collect()
    };
    let (ours, bare) = (points(&samples.handed_over), points(&samples.bare));
    // The chart ends at the 99th percentile, because a few slow runs would compress the rest.
    let shown = [value(&samples.handed_over, 99), value(&samples.bare, 99)];
    let mut chart = Chart::new(
        Axis::linear(0.0, 100.0),
        Axis::from_zero(shown.into_iter()),
        "percent of runs",
        "µs",
    );
    chart.line(&ours, COLOURS[0], false);
    chart.line(&bare, COLOURS[0], true);
    let row = &figures.row;
    let caption = format!(
        "{}, {}, {}; dashed: {}",
        escaped(&row.case.name),
        row.layouts.name(),
        escaped(&row.transport),
        escaped(&figures.limit)
    );
    chart.finish(page, &caption);
}

#[derive(Clone, Copy)]
struct Axis {
    from: f64,
    to: f64,
    logarithmic: bool,
}

impl Axis {
    fn linear(from: f64, to: f64) -> Axis {
        Axis { from, to, logarithmic: false }
    }

    fn from_zero(values: impl Iterator<Item = f64>) -> Axis {
        Axis::linear(0.0, values.fold(f64::MIN_POSITIVE, f64::max) * 1.05)
    }

    fn logarithmic(values: impl Iterator<Item = f64> + Clone) -> Axis {
        let least = values.clone().fold(f64::INFINITY, f64::min);
        Axis { from: least / 1.5, to: values.fold(0.0, f64::max) * 1.5, logarithmic: true }
    }

    /// Position of a value on the axis, 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let place = match self.logarithmic {
            true => (value / self.from).ln() / (self.to / self.from).ln(),
            false => (value - self.from) / (self.to - self.from),
        };
        place.clamp(0.0, 1.0)
    }

    fn marks(&self) -> Vec<f64> {
        if self.logarithmic {
            let powers = self.from.log10().ceil() as i32..=self.to.log10().floor() as i32;
            return powers.map(|power| 10f64.powi(power)).collect();
        }
        (0..=4).map(|mark| self.from + (self.to - self.from) * f64::from(mark) / 4.0).collect()
    }
}

struct Chart {
    x: Axis,
    y: Axis,
    svg: String,
}

impl Chart {
    fn new(x: Axis, y: Axis, x_name: &str, y_name: &str) -> Chart {
        let mut chart = Chart { x, y, svg: String::new() };
        let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - 10.0);
        for mark in y.marks() {
            let at = chart.at((x.from, mark)).1;
            let _ = writeln!(
                chart.svg,
                "<line x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                at + 4.0,
                brief(mark)
            );
        }
        for mark in x.marks() {
            let at = chart.at((mark, y.from)).0;
            let _ = writeln!(
                chart.svg,
                "<line x1=\"{at:.1}\" y1=\"{bottom}\" x2=\"{at:.1}\" y2=\"{:.1}\" stroke=\"#888\"/>\
                 <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                bottom + 4.0,
                bottom + 17.0,
                brief(mark)
            );
        }
        let _ = writeln!(
            chart.svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{x_name}</text>\
             <text transform=\"translate(14 {:.1}) rotate(-90)\" \
             text-anchor=\"middle\">{y_name}</text>",
            (LEFT + right) / 2.0,
            HEIGHT - 6.0,
            (TOP + bottom) / 2.0
        );
        chart
    }

    fn at(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let (width, height) = (WIDTH - 10.0 - LEFT, HEIGHT - BOTTOM - TOP);
        (LEFT + width * self.x.place(x), HEIGHT - BOTTOM - height * self.y.place(y))
    }

    fn line(&mut self, points: &[(f64, f64)], colour: &str, dashed: bool) {
        let places: Vec<(f64, f64)> = points.iter().map(|&point| self.at(point)).collect();
        let path: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let dash = if dashed { " stroke-dasharray=\"5 4\"" } else { "" };
        let _ = writeln!(
            self.svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" \
             stroke-width=\"1.8\"{dash}/>",
            path.join(" ")
        );
        if points.len() < 30 && !dashed {
            for (x, y) in places {
                let _ = writeln!(
                    self.svg,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>"
                );
            }
        }
    }

    fn legend(&mut self, index: usize, name: &str, colour: &str) {
        let y = TOP + 14.0 + 16.0 * index as f64;
        let _ = writeln!(
            self.svg,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"{y:.1}\">{}</text>",
            LEFT + 14.0,
            y - 4.0,
            LEFT + 24.0,
            escaped(name)
        );
    }

    fn finish(self, page: &mut String, caption: &str) {
        let _ = writeln!(
            page,
            "<figure><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
             role=\"img\">\n{}</svg><figcaption>{caption}</figcaption></figure>",
            self.svg
        );
    }
}

fn brief(value: f64) -> String {
    for (unit, name) in [(1e9, "G"), (1e6, "M"), (1e3, "k")] {
        if value >= unit {
            return format!("{:.3}", value / unit)
                .trim_end_matches('0')
                .trim_end_matches('.')
                .to_string()
                + name;
        }
    }
    format!("{value:.2}").trim_end_matches('0').trim_end_matches('.').to_string()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_lie_between_the_ends_of_their_axis() {
        let axis = Axis::logarithmic([2048.0, 1e9].into_iter());
        assert!(axis.place(2048.0) > 0.0 && axis.place(2048.0) < 0.1);
        assert!(axis.place(1e9) > 0.9 && axis.place(1e9) < 1.0);
        assert_eq!(axis.marks().len(), 6);
        let axis = Axis::from_zero([4.0, 8.0].into_iter());
        assert_eq!(axis.place(0.0), 0.0);
        assert!((axis.place(4.2) - 0.5).abs() < 1e-9);
        assert_eq!([brief(1e6), brief(1500.0), brief(0.5), brief(0.0)], ["1M", "1.5k", "0.5", "0"]);
    }
}
