// Asks for the plan of the question in the form whenever it changes, and shows what the server renders. The address holds
// the question, so that a link is one.
"use strict";
(() => {
  const state = document.getElementById("state");
  const form = document.getElementById("question");
  const preset = document.getElementById("preset");
  const fields = [...form.elements].filter((element) => element.name);
  const sliders = [...form.querySelectorAll("input[type=range]")];
  const page = crypto.getRandomValues(new Uint32Array(4)).join("-");
  let number = 0;
  let timer = 0;

  const say = (text, bad) => {
    state.textContent = text;
    state.classList.toggle("bad", Boolean(bad));
  };

  const read = (element) => {
    if (element.type === "checkbox") return element.checked;
    return element.type === "number" ? Number(element.value) : element.value;
  };

  const write = (element, text) => {
    if (element.type === "checkbox") element.checked = String(text) === "true";
    else element.value = text;
  };

  const question = () => Object.fromEntries(fields.map((element) => [element.name, read(element)]));

  const follow = () => {
    for (const slider of sliders) slider.value = Math.round(Math.log2(Math.max(1, form.elements[slider.dataset.for].value)));
    const asked = question();
    const same = (option) => option.value && Object.entries(JSON.parse(option.value)).every(([name, value]) => asked[name] === value);
    preset.value = [...preset.options].find(same)?.value ?? "";
  };

  // The server's markup is rendered from escaped values; a section is replaced as a whole.
  const replace = (id, html) => {
    const section = document.getElementById(id);
    if (!section) return;
    const open = [...section.querySelectorAll("details")].map((element) => element.open);
    section.innerHTML = html;
    section.hidden = !html;
    section.querySelectorAll("details").forEach((element, index) => { element.open = Boolean(open[index]); });
  };

  const ask = async (kind, asked, mine) => {
    const answer = await fetch("/api/plan", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ kind, page, number: mine, question: asked }),
    });
    if (mine !== number) return null;
    if (answer.ok) return answer.json();
    const reason = answer.status === 401 ? "The token is missing; open the address that was printed." : await answer.text();
    throw Object.assign(new Error(reason), { status: answer.status });
  };

  const show = (news) => {
    for (const [id, html] of Object.entries(news?.sections ?? {})) replace(id, html);
  };

  const plan = async () => {
    if (!form.checkValidity()) return say("A field is out of its bounds.", true);
    const mine = ++number;
    const asked = question();
    history.replaceState(null, "", `?${new URLSearchParams(asked)}`);
    say("planning …");
    form.setAttribute("aria-busy", "true");
    const started = performance.now();
    try {
      const news = await ask("plan", asked, mine);
      if (!news) return;
      show(news);
      document.body.classList.remove("stale");
      const seconds = ((performance.now() - started) / 1000).toFixed(1);
      say(`${news.state} in ${seconds} s; the curve over devices follows …`);
      const curve = await ask("curve", asked, mine);
      if (!curve) return;
      show(curve);
      say(`${news.state} in ${seconds} s`);
    } catch (error) {
      if (mine !== number) return;
      document.body.classList.add("stale");
      say(error instanceof TypeError ? "no answer: meshwright plan --serve has ended, or can't be reached" : error.message, true);
      // Where nothing fits, the curve still says how many devices would do.
      if (error.status === 422) show(await ask("curve", asked, mine).catch(() => null));
    } finally {
      if (mine === number) form.removeAttribute("aria-busy");
    }
  };

  const changed = () => {
    follow();
    clearTimeout(timer);
    timer = setTimeout(plan, 150);
  };

  for (const slider of sliders)
    slider.addEventListener("input", (event) => {
      event.stopPropagation();
      form.elements[slider.dataset.for].value = 2 ** slider.value;
      changed();
    });
  preset.addEventListener("input", (event) => {
    event.stopPropagation();
    if (!preset.value) return;
    for (const [name, value] of Object.entries(JSON.parse(preset.value))) write(form.elements[name], value);
    changed();
  });
  form.addEventListener("input", changed);
  form.addEventListener("submit", (event) => event.preventDefault());

  const themes = [...document.querySelectorAll("input[name=theme]")];
  for (const input of themes) {
    input.checked = input.value === (localStorage.getItem("theme") || "auto");
    input.addEventListener("change", () => localStorage.setItem("theme", input.value));
  }

  // A link may hold any of the fields.
  const linked = new URLSearchParams(location.search);
  for (const element of fields) if (linked.has(element.name)) write(element, linked.get(element.name));
  follow();
  plan();
})();
