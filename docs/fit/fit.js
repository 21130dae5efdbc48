// The page "Will it fit?": fills <div id="fit"> with a form, a bar per technique, a command and a table.
// data.js has the predictions, which build.py makes. The question is in the URL: #model=…&task=…&length=…&batch=…&gpu=…
"use strict";

(() => {
  const home = new URL(".", document.currentScript.src);
  const PARTS = ["weights", "gradients", "optimizer state", "activations", "other", "CUDA"];
  const TASKS = {
    "text-classification": "text classification",
    "instruction-tuning": "instruction tuning",
    "image-classification": "image classification",
  };
  const OWN = "another GPU";
  const VERDICTS = { fits: "✓ fits", close: "? may fit", no: "✗ does not fit" };
  const GB = 1e9;

  function element(name, properties = {}, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  // Return the answer for each technique: the parts and the bounds in bytes, and the verdict
  function answer(question) {
    const model = FIT.models[question.model];
    const peaks = model.tasks[question.task][question.length];
    const column = FIT.sizes.indexOf(question.batch);
    return FIT.rows.flatMap(([rung, options, title, suits], number) => {
      if (question.old && !suits) return [];
      const peak = (question.old && peaks[`${number}old`]) || peaks[number]; // in 32 bits all GPUs take the same
      const [weights, gradients, optimizer, activations, logits, other] = peak[column].map((value) => value * 1e6);
      const tensors = weights + gradients + optimizer + activations + logits + other;
      const [low, expected, high] = FIT.overhead.map(
        ([context, workspace, fragmentation]) => tensors + context + workspace + fragmentation * (tensors + workspace),
      );
      const parts = [weights, gradients, optimizer, activations + logits, other, expected - tensors];
      const verdict = high <= question.memory ? "fits" : low <= question.memory ? "close" : "no";
      return [{ rung, title, parts, low, expected, high, verdict, command: command(question, rung, options) }];
    });
  }

  function command(question, rung, options) {
    const words = ["python", `src/${rung}.py`, "--model", FIT.models[question.model].name];
    if (question.task !== "text-classification") words.push("--task", question.task);
    if (question.task === "instruction-tuning") words.push("--dataset", "answers.jsonl");
    if (question.task === "image-classification") words.push("--dataset", "photos/");
    else words.push("--max_length", question.length);
    const whole = rung.startsWith("17_"); // the effective batch is one micro-batch
    if (!whole) words.push("--micro_batch_size", question.batch);
    if (whole || question.batch === 16) words.push("--batch_size", whole ? question.batch : 32);
    return options ? `${words.join(" ")} ${options}` : words.join(" ");
  }

  // Return the question in the URL. Values that the data do not have are replaced.
  function readQuestion() {
    const given = new URLSearchParams(location.hash.slice(1));
    const choose = (value, values) => (values.includes(value) ? value : values[0]);
    const model = choose(given.get("model") ?? "Qwen3 8B", Object.keys(FIT.models));
    const task = choose(given.get("task") ?? "instruction-tuning", Object.keys(FIT.models[model].tasks));
    const lengths = Object.keys(FIT.models[model].tasks[task]);
    const length = choose(given.get("length") ?? "1024", lengths);
    const batch = choose(Number(given.get("batch") ?? 1), FIT.sizes);
    const gpu = given.get("gpu") ?? "RTX 4090";
    const known = FIT.gpus.find(([name]) => name === gpu);
    const own = Number(gpu) > 0 ? Number(gpu) : 24;
    const [name, gigabytes, old] = known ?? [OWN, own, given.get("old") === "1" ? 1 : 0];
    return { model, task, length, batch, gpu: name, gigabytes, memory: gigabytes * GB, old, row: given.get("row") };
  }

  function writeQuestion(question) {
    const own = question.gpu === OWN;
    const values = new URLSearchParams({
      model: question.model, task: question.task, length: question.length, batch: question.batch,
      gpu: own ? question.gigabytes : question.gpu,
    });
    if (own && question.old) values.set("old", "1");
    if (question.row) values.set("row", question.row);
    history.replaceState(null, "", `#${values}`);
  }

  function gigabytes(bytes, digits = 1) {
    return (bytes / GB).toFixed(digits);
  }

  function field(label, control) {
    control.id = `fit-${control.name}`;
    return element("div", { className: "fit-field" }, element("label", { htmlFor: control.id, textContent: label }), control);
  }

  function select(name, values, chosen) {
    const made = element("select", { name });
    for (const [value, text] of values) {
      made.append(element("option", { value, textContent: text, selected: String(value) === String(chosen) }));
    }
    return made;
  }

  function form(question) {
    const model = FIT.models[question.model];
    const fields = [
      field("Model", select("model", Object.keys(FIT.models).map((name) => [name, name]), question.model)),
      field("Task", select("task", Object.keys(model.tasks).map((task) => [task, TASKS[task]]), question.task)),
    ];
    if (question.task !== "image-classification") {
      const lengths = Object.keys(model.tasks[question.task]).map((length) => [length, `${length} tokens`]);
      fields.push(field("Length of the texts", select("length", lengths, question.length)));
    }
    fields.push(field("Samples in a micro-batch", select("batch", FIT.sizes.map((size) => [size, size]), question.batch)));
    const gpus = FIT.gpus.map(([name, size]) => [name, `${name}, ${size} GB`]);
    fields.push(field("GPU", select("gpu", [...gpus, [OWN, OWN]], question.gpu)));
    if (question.gpu === OWN) {
      const size = element("input", { name: "gigabytes", type: "number", min: "1", max: "1000", step: "any" });
      size.value = question.gigabytes;
      const years = [[0, "8.0 or higher"], [1, "below 8.0"]];
      fields.push(field("Its memory in GB", size), field("Compute capability", select("old", years, question.old)));
    }
    return element("form", { className: "fit-form" }, ...fields);
  }

  function bar(row, question, scale) {
    const made = element("span", { className: "fit-bar" });
    row.parts.forEach((part, number) => {
      const piece = element("span", { className: `fit-part fit-part-${number}` });
      piece.style.width = `${(100 * part) / scale}%`;
      made.append(piece);
    });
    const line = element("span", { className: "fit-line" });
    line.style.left = `${(100 * question.memory) / scale}%`;
    const over = row.expected > scale ? [element("span", { className: "fit-over", textContent: "▸" })] : [];
    const track = element("span", { className: "fit-track" }, made, line, ...over);
    track.setAttribute("aria-hidden", "true"); // the label and the table have the figures
    return track;
  }

  function bars(rows, question) {
    const longest = Math.max(...rows.map((row) => row.high));
    const scale = Math.max(1.15 * question.memory, Math.min(longest, 2 * question.memory));
    const made = element("fieldset", { className: "fit-rows" });
    made.append(element("legend", { textContent: "Choose a technique to see its command" }));
    for (const [number, row] of rows.entries()) {
      const radio = element("input", { type: "radio", name: "row", value: number, checked: row === question.chosen });
      const title = element("span", { className: "fit-title", textContent: `${row.rung.split("_")[0]} · ${row.title}` });
      const size = element("span", { className: "fit-size", textContent: `${gigabytes(row.expected)} GB` });
      const verdict = element("span", { className: `fit-verdict fit-${row.verdict}`, textContent: VERDICTS[row.verdict] });
      made.append(element("label", { className: "fit-row" }, radio, title, size, verdict, bar(row, question, scale)));
    }
    return made;
  }

  function legend(question) {
    const items = PARTS.map((part, number) =>
      element("li", {}, element("span", { className: `fit-key fit-part-${number}` }), part === "CUDA" ? "CUDA's own" : part),
    );
    items.push(element("li", {}, element("span", { className: "fit-key fit-key-line" }), `the GPU's ${question.gigabytes} GB`));
    return element("ul", { className: "fit-legend" }, ...items);
  }

  function table(rows) {
    const names = ["Technique", "Verdict", ...PARTS, "expected", "low", "high"];
    const head = element("tr", {}, ...names.map((name) => element("th", { scope: "col", textContent: name })));
    const body = rows.map((row) => {
      const values = [...row.parts, row.expected, row.low, row.high].map((value) => gigabytes(value, 2));
      const cells = [VERDICTS[row.verdict].slice(2), ...values].map((value) => element("td", { textContent: value }));
      const line = element("tr", {}, element("th", { scope: "row", textContent: `${row.rung}: ${row.title}` }), ...cells);
      line.dataset.command = row.command;
      return line;
    });
    const caption = element("caption", { textContent: "Predicted GPU memory in GB. Activations include the logits." });
    const made = element("table", {}, caption, element("thead", {}, head), element("tbody", {}, ...body));
    const frame = element("div", { className: "fit-table", tabIndex: 0 }, made);
    frame.setAttribute("role", "region");
    frame.setAttribute("aria-label", "Table of the figures");
    return frame;
  }

  function commandBox(row) {
    const words = row.command.split(" ").flatMap((word) => [" ", element("span", { textContent: word })]);
    const code = element("code", {}, ...words.slice(1));
    const copy = element("button", { type: "button", textContent: "Copy" });
    copy.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(row.command);
        copy.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code); // some browsers refuse the clipboard to files
        copy.textContent = "Selected";
      }
    });
    const text = `Rung ${row.rung.split("_")[0]}, ${row.title}, takes ${gigabytes(row.low)} to ${gigabytes(row.high)} GB, predicted:`;
    return element("div", { className: "fit-command" }, element("p", { textContent: text }), element("pre", {}, code), copy);
  }

  function summary(rows, question) {
    const fitting = rows.filter((row) => row.verdict === "fits");
    const gpu = question.gpu === OWN ? `${question.gigabytes} GB` : `the ${question.gpu} (${question.gigabytes} GB)`;
    const count = `${fitting.length} of ${rows.length} techniques fit ${gpu}.`;
    return fitting.length ? count : `${count} Try shorter texts, a smaller micro-batch, or several GPUs.`;
  }

  const page = document.getElementById("fit");
  if (!page) return;
  const status = element("p", { className: "fit-summary" }); // stays, so that screen readers read its changes
  status.setAttribute("role", "status");

  function show(focus) {
    const question = readQuestion();
    const rows = answer(question);
    const known = rows.find((row) => `${row.rung} ${row.title}` === question.row);
    const fitting = rows.filter((row) => row.verdict === "fits");
    const onGpu = fitting.find((row) => !row.rung.startsWith("11_")); // rung 11 copies every weight for each use: its speed is not measured
    question.chosen = known ?? onGpu ?? fitting[0] ?? rows.at(-1);
    const made = FIT.models[question.model].made;
    const source = `Predicted at commit ${made.commit} with PyTorch ${made.torch} and transformers ${made.transformers}.`;
    const controls = form(question);
    const answers = bars(rows, question);
    const box = element("div", {}, commandBox(question.chosen));
    const notes = question.old
      ? [element("p", { textContent: "This GPU does not compute in bfloat16: techniques in bfloat16 are left out, and mixed precision takes float16." })]
      : [];
    page.replaceChildren(
      controls, status, ...notes, legend(question), answers, box,
      element("details", {}, element("summary", { textContent: "The figures as a table" }), table(rows)),
      element("p", { className: "fit-source", textContent: source }),
    );
    status.textContent = summary(rows, question);
    controls.addEventListener("submit", (event) => event.preventDefault());
    controls.addEventListener("change", ({ target }) => {
      const changed = { ...question, [target.name]: target.value };
      if (target.name === "gigabytes" && !(Number(target.value) > 0)) changed.gigabytes = question.gigabytes;
      if (target.name === "old") changed.old = Number(target.value);
      writeQuestion(changed);
      show(target.id);
    });
    answers.addEventListener("change", ({ target }) => {
      const row = rows[Number(target.value)];
      writeQuestion({ ...question, row: `${row.rung} ${row.title}` });
      box.replaceChildren(commandBox(row));
    });
    if (focus) document.getElementById(focus)?.focus();
  }

  addEventListener("hashchange", () => show());
  const data = element("script", { src: new URL("data.js", home).href });
  data.addEventListener("load", () => show());
  document.head.append(data);
})();
