// A page that was opened as a file gets no workers from its browser: the search runs in a frame.
// The name of this file tells the plugin `offline` to fetch no other one.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    this.frame.srcdoc =
      "<script>self.postMessage = data => parent.postMessage(data, '*')</script>" +
      `<script src="${new URL(url, location)}"></script>`;
    this.isLoaded = new Promise(resolve => this.frame.addEventListener("load", resolve));
    addEventListener("message", ({source, data}) => {
      if (source === this.frame.contentWindow)
        this.dispatchEvent(new MessageEvent("message", {data}));
    });
    document.body.append(this.frame);
  }

  postMessage(data) {
    // Not the frame's own function, which answers.
    this.isLoaded.then(() => window.postMessage.call(this.frame.contentWindow, data, "*"));
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
