//! The report's page in a browser, driven over the WebDriver protocol.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use serde_json::{Value, json};

const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

fn find(names: &[&str]) -> Option<PathBuf> {
    let folders = env::var_os("PATH")?;
    let mut paths = env::split_paths(&folders)
        .flat_map(|folder| names.iter().map(move |name| folder.join(name)));
    paths.find(|path| path.is_file())
}

/// A browser. Ends with this value.
struct Browser {
    driver: Child,
    port: u16,
    session: String,
}

impl Browser {
    fn start(profile: &Path) -> Self {
        let chromium = find(&["chromium", "chromium-browser", "google-chrome"]);
        let driver = find(&["chromedriver"]);
        let (Some(chromium), Some(driver)) = (chromium, driver) else {
            panic!(
                "this test needs chromium and chromedriver in the PATH (Debian: apt install \
                 chromium chromium-driver); FUSELANE_SKIP_BROWSER=1 leaves it out"
            );
        };
        let mut driver = Command::new(driver)
            .arg("--port=0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("chromedriver starts");
        let mut lines = BufReader::new(driver.stdout.take().expect("stdout is piped")).lines();
        let port = lines
            .find_map(|line| {
                let line = line.expect("chromedriver's output is text");
                let (_, port) = line.split_once("started successfully on port ")?;
                port.trim_end_matches('.').parse().ok()
            })
            .expect("chromedriver tells its port");
        // Whatever else it prints is read, so that it never waits for us.
        thread::spawn(move || lines.for_each(drop));

        let mut browser = Self { driver, port, session: String::new() };
        let arguments = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            // The driver does not wait until the page has scrolled.
            "--force-prefers-reduced-motion",
            "--window-size=1200,900",
            &format!("--user-data-dir={}", profile.display()),
        ];
        let started = browser.call(
            "POST",
            "/session",
            json!({"capabilities": {"alwaysMatch": {
                "goog:chromeOptions": {"args": arguments, "binary": chromium},
                "goog:loggingPrefs": {"browser": "ALL"},
            }}}),
        );
        browser.session = format!("/session/{}", started["sessionId"].as_str().expect("an id"));
        browser
    }

    /// One request. Panics with the driver's words if it fails.
    fn call(&self, method: &str, path: &str, body: Value) -> Value {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .expect("the request is sent");
        let mut reader = BufReader::new(stream);
        let mut length = 0;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).expect("a header");
            if line.trim().is_empty() {
                break;
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().expect("a length");
            }
        }
        let mut answer = vec![0; length];
        reader.read_exact(&mut answer).expect("the answer is whole");
        let mut answer: Value = serde_json::from_slice(&answer).expect("the answer is JSON");
        let value = answer["value"].take();
        assert!(value.get("error").is_none(), "{method} {path}: {value}");
        value
    }

    fn post(&self, path: &str, body: Value) -> Value {
        self.call("POST", &format!("{}{path}", self.session), body)
    }

    fn open(&self, page: &Path) {
        self.post("/url", json!({"url": format!("file://{}", page.display())}));
    }

    fn script(&self, script: &str) -> Value {
        self.post("/execute/sync", json!({"script": script, "args": []}))
    }

    fn element(&self, selector: &str) -> Value {
        self.post("/element", json!({"using": "css selector", "value": selector}))
    }

    fn click(&self, selector: &str) {
        let element = self.element(selector);
        let id = element[ELEMENT].as_str().expect("an element");
        self.post(&format!("/element/{id}/click"), json!({}));
    }

    fn type_into(&self, selector: &str, text: &str) {
        let element = self.element(selector);
        let id = element[ELEMENT].as_str().expect("an element");
        self.post(&format!("/element/{id}/value"), json!({"text": text}));
    }

    /// Moves the pointer to the middle of an element, and `x` further.
    fn hover(&self, selector: &str, x: i32) {
        self.script(&format!(
            "document.querySelector({selector:?}).scrollIntoView({{behavior: 'instant', block: 'center'}})"
        ));
        let origin = self.element(selector);
        let step = json!({"type": "pointerMove", "origin": origin, "x": x, "y": 0, "duration": 20});
        let mouse = json!({"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [step]});
        self.post("/actions", json!({"actions": [mouse]}));
    }

    /// Waits until a script returns true.
    fn wait(&self, script: &str) {
        let end = Instant::now() + Duration::from_secs(10);
        while self.script(script) != json!(true) {
            assert!(Instant::now() < end, "never true: {script}");
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Lines of the console since the last call.
    fn console(&self) -> Value {
        self.post("/se/log", json!({"type": "browser"}))
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Closing the session ends Chromium. If a test has failed, that may fail too.
        if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port)) {
            let _ = write!(
                stream,
                "DELETE {} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
                self.session
            );
            // The first byte of the answer comes when Chromium has ended.
            let _ = stream.set_read_timeout(Some(Duration::from_secs(10)));
            let _ = stream.read(&mut [0]);
        }
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

/// A run folder with speed and memory tables of two families, some in both regimes, with failed
/// and wrong cells.
fn make_run(folder: &Path, factor: f64) -> usize {
    fs::create_dir_all(folder).expect("a folder");
    let facts = json!({
        "started": "2026-01-31T12:00:00Z", "arguments": ["bench"], "fuselane": "0.1.0",
        "commit": null, "os": "Linux", "isa": "avx2", "threads": 2,
        "machine": {
            "cpu": "A CPU", "physical_cores": 2, "logical_cpus": 4, "memory_bytes": 1u64 << 33,
            "available_memory_bytes": null, "transparent_huge_pages": "madvise",
            "caches": {"l1d": null, "l2": null, "l3": null},
        },
        "versions": {"torch": {"torch": "2.15.0"}},
    });
    fs::write(folder.join("run.json"), facts.to_string()).expect("facts are written");
    let mut lines = String::new();
    let mut tables = 0;
    let cases = [
        ("act", "relu", "act-{}-{}-batch12-head12-dim128-act_relu-bf16"),
        ("act", "silu", "act-{}-{}-batch12-head12-dim128-act_silu-bf16"),
        ("srmsnorm", "SRMSNorm", "layernorm-{}-{}-batch4-dim2048-use_residual_False-bf16"),
    ];
    for (family, title, name) in cases {
        for (metric, unit) in [("speed", "ms"), ("memory", "MiB")] {
            for mode in ["fwd", "bwd"] {
                let both = metric == "speed" && title == "silu";
                for alloc in if both { &["warm", "fresh"][..] } else { &["warm"] } {
                    tables += 1;
                    let table = name.replacen("{}", metric, 1).replacen("{}", mode, 1);
                    for n in [1024, 2048, 4096] {
                        let providers =
                            [("fuselane", 1.0), ("torch", 1.5), ("jax", 1.25), ("copy", 0.9)];
                        for (at, (provider, share)) in providers.into_iter().enumerate() {
                            if metric == "memory" && provider == "copy" {
                                continue;
                            }
                            let failed = provider == "jax" && n == 4096;
                            let wrong = provider == "torch" && n == 2048;
                            let value = f64::from(n) / 1024.0 * share * factor;
                            let record = json!({
                                "table": table, "family": family, "title": title, "operator": "x",
                                "metric": metric, "mode": mode, "n": n, "dtype": "bf16",
                                "provider": provider, "alloc": alloc,
                                "value": if failed { None } else { Some(value) },
                                "p20": null, "p80": null, "unit": unit, "bytes": 1 << 18,
                                "least_bytes": 1 << 17, "of_copy_limit": if at == 0 { Some(0.9) } else { None },
                                "of_roofline": null, "error": 0.5, "ok": !failed && !wrong,
                                "note": if failed { "no <memory>" } else { "" }, "calls": 9,
                            });
                            lines.push_str(&record.to_string());
                            lines.push('\n');
                        }
                    }
                }
            }
        }
    }
    lines.push_str("{\"table\": \"cut o");
    fs::write(folder.join("results.jsonl"), lines).expect("results are written");
    tables
}

const SHOWN: &str = "return [...document.querySelectorAll('.card')].filter(c => !c.hidden).length";

#[test]
fn report_page_works_in_a_browser() {
    if env::var_os("FUSELANE_SKIP_BROWSER").is_some_and(|value| value == "1") {
        eprintln!("left out: FUSELANE_SKIP_BROWSER=1");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (old, new) = (folder.path().join("old"), folder.path().join("new"));
    make_run(&old, 1.0);
    let tables = make_run(&new, 1.2);
    let output = Command::new(env!("CARGO_BIN_EXE_fuselane"))
        .arg("report")
        .args([&old, &new])
        .output()
        .expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let browser = Browser::start(&folder.path().join("profile"));
    browser.open(&new.join("index.html"));

    // A chart for every table, each with a line for ours, and the tables themselves.
    let charts = "return [...document.querySelectorAll('.card')]\
        .filter(c => c.querySelector('.chart svg polyline') && c.querySelector('table.values td')).length";
    assert_eq!(browser.script(charts), json!(tables));
    assert_eq!(browser.script(SHOWN), json!(tables));
    assert_eq!(
        browser.script("return document.querySelectorAll('.heat-row').length"),
        json!(tables)
    );
    assert_eq!(
        browser.script("return document.querySelectorAll('tr.worse').length"),
        json!(tables * 3),
        "all rows became slower"
    );
    assert_eq!(
        browser.script("return document.querySelector('td.failed').title"),
        json!("no <memory>")
    );
    assert_eq!(
        browser.script("return document.querySelectorAll('td.wrong s').length"),
        json!(tables)
    );

    // Filters hide and show, also by keyboard.
    browser.click("input[name=family][value=srmsnorm]");
    assert_eq!(browser.script(SHOWN), json!(tables - 4));
    browser.click("input[name=alloc][value=fresh]");
    assert_eq!(browser.script(SHOWN), json!(tables - 6));
    browser.click("button[type=reset]");
    browser.wait(&format!("{SHOWN} === {tables}"));
    browser.type_into("#search", "layernorm speed");
    assert_eq!(browser.script(SHOWN), json!(2));
    browser.click("button[type=reset]");
    browser.wait(&format!("{SHOWN} === {tables}"));
    browser.type_into("input[name=mode][value=fwd]", " ");
    assert_eq!(browser.script(SHOWN), json!(tables / 2));
    browser.type_into("input[name=mode][value=fwd]", " ");
    assert_eq!(browser.script(SHOWN), json!(tables));

    // A provider's line and column go together.
    let torch = "const box = [...document.querySelectorAll('input[name=provider]')]\
        .find(b => b.parentElement.textContent === 'torch');";
    let visible = "return ['.values td[data-p=\"' + box.value + '\"]', '.chart circle[fill=\"#D55E00\"]']\
        .map(s => getComputedStyle(document.querySelector(s)).display !== 'none')";
    assert_eq!(browser.script(&format!("{torch}{visible}")), json!([true, true]));
    browser.script(&format!("{torch} box.click()"));
    assert_eq!(browser.script(&format!("{torch}{visible}")), json!([false, false]));
    browser.script(&format!("{torch} box.click()"));

    // Values under the pointer: those of the nearest n, of all providers.
    browser.hover(".chart", 20);
    browser.wait("return !document.getElementById('tip').hidden");
    let tip = browser.script("return document.getElementById('tip').textContent");
    let tip = tip.as_str().expect("text");
    for part in [
        "n = 2048",
        "fuselane2.400 ms",
        "torch3.600 ms, wrong",
        "jax3.000 ms",
        "copy limit2.160 ms",
    ] {
        assert!(tip.contains(part), "{part} is not in {tip}");
    }
    browser.hover("h1", 0);
    browser.wait("return document.getElementById('tip').hidden");

    // The theme recolours page and pictures.
    let colours = "return ['body', '.card'].map(s => getComputedStyle(document.querySelector(s)).backgroundColor)\
        .concat(getComputedStyle(document.querySelector('.chart svg text')).fill)";
    let light = browser.script(colours);
    browser.click("#theme");
    let dark = browser.script(colours);
    for at in 0..3 {
        assert_ne!(light[at], dark[at]);
    }
    browser.click("#theme");
    assert_eq!(browser.script(colours), light);

    // A row of the heat map leads to its table.
    browser.click(".heat-row td.cell");
    browser.wait("return location.hash.length > 1 && !!document.querySelector('.card:target')");

    // On a phone, only what may scroll is wider than the screen.
    browser.post("/window/rect", json!({"width": 500, "height": 900}));
    let fits = "return document.documentElement.scrollWidth <= window.innerWidth";
    assert_eq!(browser.script(fits), json!(true));

    assert_eq!(browser.console(), json!([]));
}
