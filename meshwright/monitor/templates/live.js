// Keeps a run's page up to date. The token comes behind # in the address, which browsers send to nobody, and is exchanged
// for a cookie that scripts can't read.
"use strict";
(() => {
  const state = document.getElementById("state");
  // The document has the newest figures alone: every section is asked for once, then those that changed.
  let version = 0;
  let pause_ms = 2000;

  const say = (text, bad) => {
    state.textContent = text;
    state.classList.toggle("bad", Boolean(bad));
  };

  const post = (path, body, token) =>
    fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json", ...(token ? { Authorization: `Bearer ${token}` } : {}) },
      body: JSON.stringify(body),
    });

  const login = async (token) => {
    const answer = await post("/api/session", {}, token);
    if (answer.ok) location.replace(location.pathname + location.search);
    else say("That is not the token of this page.", true);
  };

  // The server's markup is rendered from escaped values; a section is replaced as a whole.
  const replace = (id, html) => {
    let section = document.getElementById(id);
    if (!section) {
      section = document.createElement("section");
      section.id = id;
      document.body.append(section);
    }
    const open = [...section.querySelectorAll("details")].map((element) => element.open);
    section.innerHTML = html;
    section.hidden = !html;
    section.querySelectorAll("details").forEach((element, index) => { element.open = Boolean(open[index]); });
  };

  // A tab that isn't painted has no frames: then a moment does.
  const frame = () => new Promise((done) => {
    requestAnimationFrame(() => setTimeout(done));
    setTimeout(done, 200);
  });

  const update = async () => {
    // A tab that nobody sees costs the run nothing.
    if (!document.hidden) {
      try {
        const answer = await fetch(`/api/sections?since=${version}`);
        if (answer.status === 401) return say("The token is missing; open the address that the run printed.", true);
        const news = await answer.json();
        for (const [id, html] of Object.entries(news.sections)) {
          replace(id, html);
          // What stands above a large drawing is painted before the next one is parsed.
          if (html.length > 10000) await frame();
        }
        version = news.version;
        pause_ms = news.pause_ms;
        say(news.state);
      } catch {
        say("no answer: the run has ended, or can't be reached", true);
      }
    }
    setTimeout(update, pause_ms);
  };

  const act = async (button) => {
    const action = button.dataset.action;
    if (action === "stop" && !confirm("End the run after a checkpoint?")) return;
    button.disabled = true;
    const answer = await post("/api/request", { action });
    say(answer.ok ? `${action}: asked for` : `${action}: refused, ${await answer.text()}`, !answer.ok);
    setTimeout(() => { button.disabled = false; }, 3000);
  };

  const themes = [...document.querySelectorAll("input[name=theme]")];
  for (const input of themes) {
    input.checked = input.value === (localStorage.getItem("theme") || "auto");
    input.addEventListener("change", () => localStorage.setItem("theme", input.value));
  }
  for (const button of document.querySelectorAll("button[data-action]"))
    button.addEventListener("click", () => act(button));

  const form = document.getElementById("login");
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token) {
    history.replaceState(null, "", location.pathname + location.search);
    login(token);
  } else if (!form) {
    update();
  }
  form?.addEventListener("submit", (event) => {
    event.preventDefault();
    login(form.elements.token.value.trim());
  });
})();
